"""Computes the age of a trajectory in a batch: steps since the weights that sampled its first token."""

from __future__ import annotations

from verbatim.core.token_tree import Int32
from verbatim.core.trajectories.record import TrajectoryRecord


def first_version(trajectory: TrajectoryRecord) -> int | None:
    """The policy version of the first sampled token; None if nothing was sampled, or it is unknown.

    Turns that are not trained do not count. Turns are in the order in which they ended. Agents that speak side by side
    may end in another order than they began, so it is the oldest of all turns.
    """
    known = (_first_known(turn.policy_versions) for turn in trajectory.turns if turn.trained)
    return min((version for version in known if version is not None), default=None)


def _first_known(versions: Int32 | None) -> int | None:
    """The first known version of a turn (-1: unknown); the later ones are not older."""
    if versions is None or not len(versions):
        return None
    if versions[0] >= 0:
        return int(versions[0])
    known = versions[versions >= 0]
    return int(known[0]) if len(known) else None


def age(trajectory: TrajectoryRecord, batch: int) -> int:
    """`n - version of the first sampled token` for batch n (counted from 0): time in flight and in queues counts.
    0 if the version is unknown.

    Example: a rollout whose first token was sampled by version 4 and whose last by version 6 has age 3 in batch 7.
    """
    version = first_version(trajectory)
    return 0 if version is None else batch - version
