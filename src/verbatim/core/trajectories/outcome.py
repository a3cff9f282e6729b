"""Defines what becomes of a trajectory's sampled tokens: each turn is trained, or dropped for one reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from verbatim.core.records.fields import Float32
from verbatim.core.trajectories.record import TrajectoryRecord

TRAINED = "trained"
"""The outcome of tokens on which an optimizer step is taken."""
EVALUATION = "evaluation"
"""The outcome of tokens that were sampled for an evaluation. These tokens are never trained and are not in the ledger.
Every other outcome is a reason of the `Ledger`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryOutcome:
    """The outcome of every sampled token of one trajectory.

    Example: two turns of 3 and 2 tokens; the second exceeds the maximum length of a sample.

        >>> from verbatim import Turn
        >>> turns = [Turn(prompt_ids=[1], completion_ids=[2] * count) for count in (3, 2)]
        >>> trajectory = Trajectory(example_id="x", turns=turns)
        >>> outcome = TrajectoryOutcome(trajectory=trajectory, turns=("trained", "over_length"))
        >>> outcome.num_trained_tokens, outcome.dropped
        (3, {'over_length': 2})
    """

    trajectory: TrajectoryRecord
    """The trajectory with its advantages."""
    turns: tuple[str, ...]
    """The outcome of each turn's completion, in order."""
    unrecorded: str | None = None
    """The outcome of the sampled tokens that are in no turn, or None if there are no such tokens."""
    reason: str | None = None
    """Why the whole trajectory is not trained, or None if the outcome was decided for each turn separately."""
    flags: tuple[str, ...] = ()
    """The filters that flagged the trajectory, including filters that only count."""
    trainer_logprobs: tuple[Float32 | None, ...] = ()
    """The trainer's logprobs of each turn's completion, float32 [C], or None for an untrained turn. Empty if these
    logprobs were not kept."""
    gradients: tuple[Float32 | None, ...] = ()
    """Derivative of the loss (not yet normalised) with respect to each logprob in `trainer_logprobs`: float32 [C]."""
    teacher_logprobs: tuple[Float32 | None, ...] = ()
    """The teacher's logprobs of each turn's completion, float32 [C], or None for a turn that the teacher did not score.
    Empty without a teacher."""

    def __post_init__(self) -> None:
        assert len(self.turns) == len(self.trajectory.turns), "each turn needs an outcome"
        assert len(self.teacher_logprobs) in (0, len(self.turns))
        assert len(self.trainer_logprobs) in (0, len(self.turns)) and len(self.gradients) == len(self.trainer_logprobs)
        assert bool(self.trajectory.num_unrecorded_tokens) <= (self.unrecorded is not None), "unrecorded needs one too"

    @classmethod
    def of_dropped(cls, trajectory: TrajectoryRecord, reason: str, flags: Sequence[str] = ()) -> Self:
        """The outcome of a trajectory whose tokens are all dropped for this reason."""
        unrecorded = reason if trajectory.num_unrecorded_tokens else None
        return cls(
            trajectory=trajectory,
            turns=(reason,) * len(trajectory.turns),
            unrecorded=unrecorded,
            reason=reason,
            flags=tuple(flags),
        )

    @classmethod
    def of_evaluated(cls, trajectory: TrajectoryRecord) -> Self:
        """The outcome of a trajectory of an evaluation."""
        return cls.of_dropped(trajectory, EVALUATION)

    @property
    def num_tokens(self) -> dict[str, int]:
        """Number of sampled tokens by outcome; outcomes without tokens are left out."""
        found: dict[str, int] = {}
        for outcome, turn in zip(self.turns, self.trajectory.turns, strict=True):
            found[outcome] = found.get(outcome, 0) + len(turn.completion_ids)
        if self.unrecorded is not None:
            found[self.unrecorded] = found.get(self.unrecorded, 0) + self.trajectory.num_unrecorded_tokens
        return {outcome: count for outcome, count in found.items() if count}

    @property
    def num_trained_tokens(self) -> int:
        """Number of trained tokens."""
        return self.num_tokens.get(TRAINED, 0)

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped tokens by reason."""
        return {outcome: count for outcome, count in self.num_tokens.items() if outcome != TRAINED}
