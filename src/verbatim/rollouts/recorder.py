"""Records the turns of an episode as exact ids. All agents of an episode share one recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from verbatim.core.errors import RecordError, SamplerFault
from verbatim.core.records.experts import Experts, Routing
from verbatim.core.token_tree import Ids, Int32, TokenTree, as_ids
from verbatim.core.types import Turn


class Recorder:
    """The turns of one trajectory, in the order of sampling.

    Every turn is passed to `record` with its full prompt. The recorder compares ids with the ids of earlier turns, and
    stores only the ids that no earlier turn has. Errors name the trajectory, the turn and the position.

    Args:
        vocab_size: Number of ids in the vocabulary; every id must be less than this.
        on_sampled: Called with the number of tokens of each completion, for the ledger.
        on_dropped: Called with token counts by reason, for the ledger. It gets the tokens that will be in no
            trajectory: tokens passed to `lose`, tokens of lost replicas, and tokens that came after the episode's end.
        trajectory_id: The trajectory's id, for messages.
        routing: Routing of the model in training, for checking the experts that a sampler returns; None to skip the
            check.
    """

    def __init__(
        self,
        vocab_size: int,
        on_sampled: Callable[[int], None] | None = None,
        on_dropped: Callable[[Mapping[str, int]], None] | None = None,
        *,
        trajectory_id: str = "",
        routing: Routing | None = None,
    ) -> None:
        self._on_sampled, self._on_dropped, self._trajectory_id = on_sampled, on_dropped, trajectory_id
        self._routing = routing
        self._vocab_size = vocab_size
        self._tree = TokenTree(vocab_size)
        self._closed = False
        self.turns: list[Turn] = []
        self.num_sampled_tokens = 0
        self.late: RecordError | None = None
        """The error of the first attempt to sample or record after the episode had ended, or None."""

    def record(self, *, prompt_ids: Ids, completion_ids: Ids, extends: int | None = None, **fields: Any) -> int:
        """Add a turn, and return its index.

        Args:
            prompt_ids: All ids of the prompt: int32 [P].
            completion_ids: All sampled ids: int32 [C].
            extends: Index of the turn that the prompt extends by a bridge, or None. The recorder verifies this.
            fields: The other fields of `Turn`.

        Raises:
            RecordError: an id is outside the vocabulary, a field is invalid, the prompt does not extend the turn that
                `extends` names, or the episode has ended.
        """
        if self._closed:
            raise self.went_on()
        index = len(self.turns)
        try:
            path, stored = self._tree.add(as_ids(prompt_ids, "prompt_ids"), as_ids(completion_ids, "completion_ids"))
            turn = Turn(path=path, completion_ids=stored, **fields)
            if turn.kept_sets is not None and turn.kept_sets.ids.max(initial=0) >= self._vocab_size:
                raise RecordError(f"kept_sets: an id is outside the vocabulary of {self._vocab_size} ids")
            if extends is not None:
                _check_extends(turn, self.turns[extends], extends)
        except RecordError as error:
            raise RecordError(f"{self._where(index)}: {error}") from error
        self.turns.append(turn)
        return index

    def foresee(self, prompt_ids: Int32) -> None:
        """Announce a prompt that will be recorded together with its completion. The prompt's array becomes
        read-only."""
        if prompt_ids.flags.owndata:
            prompt_ids.flags.writeable = False
        self._tree.foresee(prompt_ids)

    def num_routed(self, prompt_ids: Int32, agent: str = "main") -> int:
        """Return the number of leading prompt tokens whose experts are already recorded. If the prompt extends the
        agent's last turn, these are all tokens of that turn except the last, which the model has not processed yet;
        otherwise the number is 0. A turn stores only the experts that earlier turns lack."""
        last = next((turn for turn in reversed(self.turns) if turn.agent == agent), None)
        if last is None or last.routed_experts is None or last.path.length > len(prompt_ids):
            return 0
        return last.path.length - 1 if np.array_equal(last.path.ids(), prompt_ids[: last.path.length]) else 0

    def refuse_other_experts(self, experts: Experts | None) -> None:
        """Refuse experts that do not fit the model in training.

        Raises:
            SamplerFault: the sampler serves a different model.
        """
        if self._routing is None or experts is None or (problem := self._routing.problem(experts)) is None:
            return
        raise SamplerFault(f"{problem}: the sampler serves another model")

    def count(self, num_tokens: int) -> None:
        """Count the tokens of a completion, whether or not it can be recorded. After the end of the episode, the tokens
        are counted and dropped as `error`, and a RecordError is raised."""
        self.count_cancelled(num_tokens)
        self.refuse_if_closed()

    def count_cancelled(self, num_tokens: int) -> None:
        """Count tokens that were sampled for a completion that will not be returned and so cannot be recorded."""
        if self._on_sampled is not None:
            self._on_sampled(num_tokens)
        if not self._closed:
            self.num_sampled_tokens += num_tokens
        elif self._on_dropped is not None:
            self._on_dropped({"error": num_tokens})

    def count_lost(self, num_tokens: int) -> None:
        """Count tokens that were sampled but discarded, because their replica was lost. Each affected request has been
        sent again, to another replica."""
        if num_tokens and self._on_sampled is not None:
            self._on_sampled(num_tokens)
        if num_tokens and self._on_dropped is not None:
            self._on_dropped({"lost_replica": num_tokens})

    def lose(self, num_tokens: int) -> None:
        """Count tokens as dropped for the reason `lost_worker`: the process for which they were sampled has ended. They
        are already counted as sampled."""
        assert 0 <= num_tokens <= self.num_sampled_tokens
        self.num_sampled_tokens -= num_tokens
        if self._on_dropped is not None:
            self._on_dropped({"lost_worker": num_tokens})

    @property
    def num_unrecorded_tokens(self) -> int:
        """Number of counted tokens that are in no turn."""
        return self.num_sampled_tokens - sum(len(turn.completion_ids) for turn in self.turns)

    def amend(self, index: int, **changes: object) -> None:
        """Change those fields of a turn that become known only after the completion: reward, timing, parse status,
        `trained`. Ids and logprobs never change."""
        assert changes.keys() <= {"reward", "timing", "parse_status", "trained"}
        self.turns[index] = self.turns[index].replace(**changes)

    def close(self) -> None:
        """End the recording. Later turns are refused."""
        self._closed = True
        self._tree = TokenTree()  # frees the index; the turns reference the parts that they need

    def refuse_if_closed(self) -> None:
        """Raise a RecordError if the episode has ended, and store it as `late`."""
        if self._closed:
            raise self.went_on()

    def went_on(self) -> RecordError:
        """Return the error for a caller that continues after the end of the episode. Store the error as `late`, which
        makes the episode fail."""
        error = self.refusal()
        self.late = self.late or error
        return error

    def refusal(self) -> RecordError:
        """Return the error for a call that comes after the end of the episode although the caller made no mistake. The
        error is not stored as `late`."""
        return RecordError(f"{self._where(len(self.turns))}: sampled or recorded after the episode had ended")

    def _where(self, index: int) -> str:
        return f"trajectory {self._trajectory_id!r}, turn {index}" if self._trajectory_id else f"turn {index}"


def _check_extends(turn: Turn, earlier: Turn, index: int) -> None:
    if turn.extends(earlier):
        return
    length, known = turn.num_prompt_tokens, earlier.path.length
    shared = min(length, turn.path.shared_with(earlier.path))
    ends = f"the prompt ends at position {shared}; turn {index} has {known} tokens"
    what = ends if shared == length else f"the prompt differs from turn {index} at position {shared}"
    raise RecordError(f"prompt_ids: should extend turn {index}, but {what}")
