"""Accounts for tokens: every sampled token is trained, pending, or dropped for one counted reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

REASONS = (
    "difficulty",
    "stale",
    "error",
    "missing_logprobs",
    "untrained",
    "over_length",
    "cancelled",
    "lost_worker",
    "lost_replica",
    "unused_at_end",
)
"""Reasons why a token is not trained; filters add `filter:{name}`."""


class Ledger:
    """Cumulative token counts of a run: `sampled = trained + dropped + pending`, checked at every step.

    Tokens are counted when they appear (a sampler returned them) and when they end (in an optimizer step, or dropped
    for a reason). `pending` is not derived from the other counts, because the equation would then always hold. Instead,
    everything that holds tokens counts its own tokens, and `check` compares the sums.

    Example:
        >>> ledger = Ledger()
        >>> ledger.sampled_tokens(10)
        >>> ledger.settle_group(0, trained=6, dropped={"filter:zero_advantage": 3})
        >>> ledger.check(pending=1)
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.trained = 0
        self.masked_by_loss = 0
        self.dropped: Counter[str] = Counter()
        self._settled_below = 0
        # The settled groups are all groups below this bound and those in the set, so that memory stays bounded in a
        # long run.
        self._settled_above: set[int] = set()

    def sampled_tokens(self, count: int) -> None:
        """Count tokens that a sampler returned."""
        assert count >= 0
        self.sampled += count

    def settle_group(self, index: int, *, trained: int, dropped: Mapping[str, int]) -> None:
        """Count the tokens of a group that has ended; a group can end only once.

        Raises:
            AssertionError: the group was settled before, so its tokens would be trained twice.
        """
        assert not self.is_settled(index), f"group {index} was settled before: its tokens would be trained twice"
        self._settled_above.add(index)
        while self._settled_below in self._settled_above:
            self._settled_above.remove(self._settled_below)
            self._settled_below += 1
        assert trained >= 0
        self.trained += trained
        self.drop(dropped)

    def is_settled(self, index: int) -> bool:
        """True if this group has ended."""
        return index < self._settled_below or index in self._settled_above

    def drop(self, dropped: Mapping[str, int]) -> None:
        """Count tokens that will never be trained, by reason."""
        for reason, count in dropped.items():
            assert reason in REASONS or reason.startswith("filter:"), f"unknown reason {reason!r}"
            assert count >= 0
            if count:
                self.dropped[reason] += count

    def check(self, pending: int) -> None:
        """Stop the run if tokens were lost or counted twice.

        Args:
            pending: Tokens of episodes in flight and of groups waiting to be trained.

        Raises:
            AssertionError: the counts do not add up.
        """
        total = self.trained + sum(self.dropped.values()) + pending
        assert self.sampled == total, (
            f"the ledger does not add up: sampled {self.sampled} != trained {self.trained} + dropped "
            f"{dict(self.dropped)} + pending {pending} (difference {self.sampled - total})"
        )

    def metrics(self, pending: int) -> dict[str, float]:
        """The counts as metrics."""
        return {
            "ledger/sampled": self.sampled,
            "ledger/trained": self.trained,
            "ledger/pending": pending,
            "ledger/masked_by_loss": self.masked_by_loss,
            **{f"ledger/dropped/{reason}": count for reason, count in sorted(self.dropped.items())},
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "masked_by_loss": self.masked_by_loss,
            "dropped": dict(self.dropped),
            "settled_below": self._settled_below,
            "settled_above": sorted(self._settled_above),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.sampled, self.trained = state["sampled"], state["trained"]
        self.masked_by_loss = state["masked_by_loss"]
        self.dropped = Counter(state["dropped"])
        self._settled_below, self._settled_above = state["settled_below"], set(state["settled_above"])
