"""What an episode has recorded so far: turns as exact ids, shared by the agents that speak in it."""

from __future__ import annotations

import copy
from collections.abc import Callable

from verbatim.errors import RecordError
from verbatim.types import Int32, TokenPath, Turn, common_prefix_length, share_prompt


class Recorder:
    """The turns of one trajectory, in the order of sampling.

    Args:
        vocab_size: Ids must be below this.
        on_sampled: Called with the number of tokens of each completion (the ledger listens).
    """

    def __init__(self, vocab_size: int, on_sampled: Callable[[int], None] | None = None) -> None:
        self._vocab_size = vocab_size
        self._on_sampled = on_sampled
        self.turns: list[Turn] = []
        self.num_sampled_tokens = 0

    def path(self, prompt_ids: Int32) -> Int32 | TokenPath:
        """A prompt as a turn should store it: where it extends the turn before, as what it adds to that."""
        if self.turns:
            before = self.turns[-1].context_path
            if common_prefix_length(before.materialize(), prompt_ids) == len(before):
                return TokenPath(prompt_ids[len(before) :].copy(), base=before, shared=len(before))
        return prompt_ids

    def record(self, turn: Turn) -> int:
        """Add a turn; its index.

        Raises:
            RecordError: an id outside the vocabulary.
        """
        index = len(self.turns)
        for what, ids in (("prompt", turn.prompt_path.tail), ("completion", turn.completion_ids)):
            self._check_vocabulary(ids, f"turn {index}, {what}")
        self.turns.append(share_prompt(turn, self.turns))
        return index

    def count(self, num_tokens: int) -> None:
        """A sampler returned this many tokens, whether or not they can be recorded."""
        self.num_sampled_tokens += num_tokens
        if self._on_sampled is not None:
            self._on_sampled(num_tokens)

    def amend(self, index: int, **changes: object) -> None:
        """Add what became known after the completion: tool results, timing, reward. Never ids or logprobs."""
        assert set(changes) <= {"reward", "timing", "parse_status"}
        # Not `replace`, which would check and copy again what has not changed.
        amended = copy.copy(self.turns[index])
        vars(amended).update(changes)
        self.turns[index] = amended

    def _check_vocabulary(self, ids: Int32, where: str) -> None:
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            position = int(((ids < 0) | (ids >= self._vocab_size)).argmax())
            raise RecordError(f"{where}: id {int(ids[position])} at position {position} is outside the vocabulary of "
                              f"{self._vocab_size}")
