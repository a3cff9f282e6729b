"""Holds the data of one break: the recorded sequence, the prompt that should extend this sequence, and the texts of
both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from verbatim.core.types import StopReason, Turn
from verbatim.inspection.doctor.alignment import Alignment, Change, align
from verbatim.inspection.doctor.samples import SampleOpening
from verbatim.inspection.doctor.text import TokenText

_BEFORE = 16
"""Number of tokens to decode before a completion, because the opening tag of its thinking may be in the generation
prompt."""
_AROUND = 4
"""Number of equal tokens to decode before and after a change, so that no character is split."""


@dataclass(frozen=True, kw_only=True)
class CompletionSpan:
    """The completion of a turn, at positions `start` to `end` of the earlier sequence."""

    turn: int
    start: int
    end: int
    truncated: bool
    """True if the completion was cut off by a limit on tokens or time."""


@dataclass(frozen=True, eq=False)
class Difference:
    """One break, in the form that the tests in `evidence` need to determine its class."""

    turns: Sequence[Turn]
    opening: SampleOpening
    """The turn whose prompt breaks, and the sample to compare it with."""
    text: TokenText | None
    """Decodes ids; None if there is no tokenizer."""
    tools: Sequence[str]
    """The tool schemas of each turn's request; empty if the log has none."""

    @property
    def at(self) -> int:
        """The position of the first difference."""
        return self.opening.shared

    @cached_property
    def earlier(self) -> list[int]:
        """The ids of the compared sample's last turn: its prompt and its completion."""
        ids: list[int] = self.turns[self.opening.against[-1]].path.ids().tolist()
        return ids

    @cached_property
    def prompt(self) -> list[int]:
        """The ids of the breaking turn's prompt."""
        ids: list[int] = self.turns[self.opening.turn].prompt_ids.tolist()
        return ids

    @cached_property
    def alignment(self) -> Alignment:
        return align(self.earlier, self.prompt, self.at)

    @property
    def change(self) -> Change:
        return self.alignment.changes[0]

    @cached_property
    def spans(self) -> tuple[CompletionSpan, ...]:
        """The completions in the earlier sequence, in order."""
        return tuple(
            CompletionSpan(
                turn=index, start=turn.num_prompt_tokens, end=turn.path.length, truncated=turn.stop_reason.truncated
            )
            for index, turn in ((i, self.turns[i]) for i in self.opening.against)
        )

    @property
    def span(self) -> CompletionSpan:
        """The completion that contains the first difference, or else the next completion after the difference."""
        return next((span for span in self.spans if self.at < span.end), self.spans[-1])

    def is_gone(self, span: CompletionSpan) -> bool:
        """True if the entire completion is missing from the prompt."""
        return any(change.start <= span.start and span.end <= change.end for change in self.alignment.changes)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Tokens that end a turn: the last tokens of completions that were not cut off.

        If a stop string ended a completion, the completion's last token can be any token. Therefore only the
        tokenizer's own stop tokens and control tokens count; without a tokenizer, only the most frequent last token
        counts.
        """
        ends = Counter(
            int(turn.completion_ids[-1])
            for turn in self.turns
            if turn.stop_reason is StopReason.STOP and len(turn.completion_ids)
        )
        if self.text is None:
            return frozenset(token for token, _ in ends.most_common(1))
        return self.text.stops | (ends.keys() & self.text.control)

    # -- texts, which need a tokenizer

    @cached_property
    def texts(self) -> tuple[str, str]:
        """The texts of (earlier sequence, prompt). They begin shortly before the first difference, or shortly before
        the completion that contains this difference."""
        assert self.text is not None
        start = max(0, min(self.at, self.span.start) - _BEFORE)
        return self.text.decode(self.earlier[start:]), self.text.decode(self.prompt[start:])

    @cached_property
    def opening_texts(self) -> tuple[str, str]:
        """The text of the earlier sequence up to its first completion, and the text of the whole prompt."""
        assert self.text is not None
        return self.text.decode(self.earlier[: self.spans[0].start]), self.text.decode(self.prompt)

    @cached_property
    def changed_texts(self) -> tuple[str, str]:
        """The texts of the first change in the earlier sequence and in the prompt, each with a few equal tokens around
        the change."""
        assert self.text is not None
        change, start = self.change, max(0, self.at - _AROUND)
        # Equal tokens follow the first change only if the sequences meet again after it.
        after = _AROUND if self.alignment.meets_again or len(self.alignment.changes) > 1 else 0
        return (
            self.text.decode(self.earlier[start : change.end + after]),
            self.text.decode(self.prompt[start : change.now_end + after]),
        )


def common_prefix(a: str, b: str) -> int:
    """The number of leading characters that two texts share."""
    # Bisection is faster than a loop over the characters, because Python compares slices in C.
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
