"""Defines a group: the trajectories of one example, over which advantages are computed."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.records.fields import fill
from verbatim.core.trajectories.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one example: what advantages are computed over."""

    group_id: str
    """Unique in its run."""
    example_id: str
    """The example they are about."""
    env: str
    """The name of their environment."""
    trajectories: tuple[Trajectory, ...]
    """In the order of their `sample_index`; failed ones included."""
    index: int = -1
    """Its number in the run, in the order in which groups are drawn; -1: unknown."""

    def __post_init__(self) -> None:
        fill(self, trajectories=tuple(self.trajectories))

    @property
    def completed(self) -> tuple[Trajectory, ...]:
        """Those without an error."""
        return tuple(t for t in self.trajectories if t.error is None)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Those of `completed` whose rewards are there and finite: a baseline is taken, and an example is judged, over
        them. A missing reward is not 0."""
        return tuple(t for t in self.completed if t.bad_reward is None)
