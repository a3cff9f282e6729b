"""The `zero_advantage` filter: flags trajectories whose advantages are all 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from verbatim.algorithms.filters.filter import Action, Reads
from verbatim.core.records.equality import are_equal
from verbatim.core.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class ZeroAdvantage:
    """Flags a trajectory when the advantages of all its sampled tokens are 0, within a tolerance of 1e-6.

    Untrained turns do not count, unless no other turn has sampled tokens.
    """

    reads: ClassVar[Reads] = "advantages"

    action: Action = "drop"
    """What happens to flagged trajectories: "drop" or "monitor"."""

    def __call__(self, trajectory: Trajectory) -> bool:
        """True if all advantages are 0."""
        of_trajectory = trajectory.advantage or 0.0
        sampled = [turn for turn in trajectory.turns if len(turn.completion_ids)]
        trained = [turn for turn in sampled if turn.trained]
        return all(
            are_equal((of_trajectory if turn.advantage is None else turn.advantage, 0.0)) for turn in trained or sampled
        )
