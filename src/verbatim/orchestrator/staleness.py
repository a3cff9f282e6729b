"""How old weights may be: for rollouts that start, and for tokens that are trained. One definition of each."""

from __future__ import annotations

from verbatim.types import Trajectory


def may_start(batch: int, version: int, max_async_level: int) -> bool:
    """Whether new rollouts for this batch may start with weights of this version: `v >= max(0, n - k)`.

    Example: with k = 1, rollouts for batch 3 may start with versions 2 and up.
    """
    return version >= max(0, batch - max_async_level)


def first_version(trajectory: Trajectory) -> int | None:
    """The policy version of the first sampled token; None if nothing was sampled, or it is unknown."""
    for turn in trajectory.turns:
        if len(turn.completion_ids):
            return None if turn.policy_versions is None else int(turn.policy_versions[0])
    return None


def age(trajectory: Trajectory, step: int) -> int:
    """`n - version of the first sampled token`: counts time in flight and in queues; 0 if unknown."""
    version = first_version(trajectory)
    return 0 if version is None else step - version
