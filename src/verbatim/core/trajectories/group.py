"""Defines a group: the trajectories of one example, within which advantages are computed."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.records.fields import fill
from verbatim.core.trajectories.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one example, within which advantages are computed."""

    group_id: str
    """Id of the group, unique within the run."""
    example_id: str
    """Id of the example."""
    env: str
    """The name of the example's environment."""
    trajectories: tuple[Trajectory, ...]
    """The trajectories, ordered by `sample_index`, including failed trajectories."""
    index: int = -1
    """Number of the group in the run, in the order in which groups were started; -1 if unknown."""

    def __post_init__(self) -> None:
        fill(self, trajectories=tuple(self.trajectories))

    @property
    def completed(self) -> tuple[Trajectory, ...]:
        """The trajectories without an error."""
        return tuple(t for t in self.trajectories if t.error is None)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """The completed trajectories whose rewards are present and finite. Baselines and the difficulty of the example
        are computed from these trajectories only, because a missing reward is not 0."""
        return tuple(t for t in self.completed if t.bad_reward is None)
