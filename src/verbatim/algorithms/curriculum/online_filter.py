"""Filters groups online by difficulty: equal rewards have no gradient, so such groups are left out of batches."""

from __future__ import annotations

import statistics
from typing import Literal, TypeAlias

from verbatim.core.records.equality import are_equal, is_at_least, is_at_most
from verbatim.core.types import Group

Flatness: TypeAlias = Literal["easy", "hard", "flat"]


def flatness(group: Group) -> Flatness | None:
    """Why a group has no gradient under a group baseline; None if it has one.

    It compares the environment's rewards, before length penalties, of the rollouts that get credit; failed and unscored
    rollouts have none. Where agents have rewards of their own, those of each agent have to be equal too. Equal rewards
    are "hard" if they are 0 or less, "easy" if they are 1 or more, else "flat"; a group without any reward gives None.

    Example: rewards 0, 0 give "hard"; 1, 1 "easy"; 0.5, 0.5 "flat"; 0, 1 None; 1 and a missing one "easy".
    """
    rewards = [trajectory.reward for trajectory in group.scored if trajectory.reward is not None]
    of_agents: dict[str, list[float]] = {}
    for trajectory in group.scored:
        for agent, earned in trajectory.agent_rewards.items():
            of_agents.setdefault(agent, []).append(earned)
    if not rewards or not all(map(are_equal, (rewards, *of_agents.values()))):
        return None
    reward = statistics.fmean(rewards)
    if is_at_most(reward, 0.0):
        return "hard"
    return "easy" if is_at_least(reward, 1.0) else "flat"
