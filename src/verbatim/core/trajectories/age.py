"""Computes the age of a trajectory in a batch: the number of steps since the weights that sampled its first token."""

from __future__ import annotations

from verbatim.core.token_tree import Int32
from verbatim.core.trajectories.record import TrajectoryRecord


def first_version(trajectory: TrajectoryRecord) -> int | None:
    """The policy version of the first sampled token, or None if no token was sampled or the version is unknown.

    Untrained turns do not count. The result is the oldest first version of all turns: turns are ordered by their end,
    and turns of concurrent agents may end in an order different from the order in which they began.
    """
    known = (_first_known(turn.policy_versions) for turn in trajectory.turns if turn.trained)
    return min((version for version in known if version is not None), default=None)


def _first_known(versions: Int32 | None) -> int | None:
    """The first known version in a turn, or None if all versions are unknown (-1). Later versions in a turn are never
    older."""
    if versions is None or not len(versions):
        return None
    if versions[0] >= 0:
        return int(versions[0])
    known = versions[versions >= 0]
    return int(known[0]) if len(known) else None


def age(trajectory: TrajectoryRecord, batch: int) -> int:
    """`n - version of the first sampled token` for batch n (counted from 0), so time in flight and in queues counts. 0
    if the version is unknown.

    Example: a rollout whose first token was sampled by version 4, and whose last token by version 6, has age 3 in batch
    7.
    """
    version = first_version(trajectory)
    return 0 if version is None else batch - version
