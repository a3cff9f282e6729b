"""The `zero_advantage` filter: flags trajectories whose advantages are all 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from verbatim.algorithms.filters.filter import Action, Reads
from verbatim.core.records.equality import are_equal
from verbatim.core.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class ZeroAdvantage:
    """Flags a trajectory when the advantage of every one of its sampled tokens is 0, or at most 1e-6 away from it.

    Turns that are not trained are left out, unless no other turn sampled anything.
    """

    reads: ClassVar[Reads] = "advantages"

    action: Action = "drop"
    """"drop" or "monitor"."""

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether all advantages are 0."""
        of_trajectory = trajectory.advantage or 0.0
        sampled = [turn for turn in trajectory.turns if len(turn.completion_ids)]
        trained = [turn for turn in sampled if turn.trained]
        return all(
            are_equal((of_trajectory if turn.advantage is None else turn.advantage, 0.0)) for turn in trained or sampled
        )
