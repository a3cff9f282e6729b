"""How old a trajectory is when a batch takes it: counted from the weights that sampled its first token."""

from __future__ import annotations

from verbatim.types import Trajectory


def first_version(trajectory: Trajectory) -> int | None:
    """The policy version of the first sampled token; None if nothing was sampled, or it is unknown."""
    for turn in trajectory.turns:
        if len(turn.completion_ids):
            return None if turn.policy_versions is None else int(turn.policy_versions[0])
    return None


def age(trajectory: Trajectory, batch: int) -> int:
    """`n - version of the first sampled token` for batch n (counted from 0): time in flight and in queues counts.
    0 if the version is unknown.

    Example: a rollout whose first token was sampled by version 4 and whose last by version 6 has age 3 in batch 7.
    """
    version = first_version(trajectory)
    return 0 if version is None else batch - version
