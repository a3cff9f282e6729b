"""Online difficulty filtering: groups whose rewards are all equal teach nothing, and never become part of a batch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from verbatim.types import Group

Flatness: TypeAlias = Literal["easy", "hard", "flat"]


def flatness(group: Group) -> Flatness | None:
    """Why a group has no gradient under a group baseline; None where it has one.

    Rewards are the environment's own, before length penalties, of the rollouts that credit is given over: one that
    failed, or was never scored, has none. A group without a reward is not judged.

    Returns:
        Of equal rewards: "hard" where they are 0 or less, "easy" where they are 1 or more, "flat" in between.

    Example: rewards 0, 0 give "hard"; 1, 1 "easy"; 0.5, 0.5 "flat"; 0, 1 None; 1 and a
    missing one "easy".
    """
    rewards = {trajectory.reward for trajectory in group.scored}
    if len(rewards) != 1:
        return None
    (reward,) = rewards
    assert reward is not None
    if reward <= 0:
        return "hard"
    return "easy" if reward >= 1 else "flat"
