"""Splits trajectories between agents with their own rewards, so that each of these agents gets its own credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.core.types import Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """One agent's share of a trajectory, or the share of all agents without their own reward."""

    whole: Trajectory
    """The trajectory itself."""
    view: Trajectory
    """The trajectory with only the turns and the reward of this share."""
    places: tuple[int, ...]
    """Indices of the share's turns in `whole.turns`."""

    @property
    def is_whole(self) -> bool:
        """True if the share is the whole trajectory."""
        return self.view is self.whole


def agents_with_rewards(rollouts: Sequence[Trajectory]) -> list[str | None]:
    """The agents with their own rewards, ordered by name, then None for all other agents together.

    The list has no None if no turn of the other agents may be trained.

    Example: rollouts with turns of the agents "a" and "b", where "b" has its own reward, give `["b", None]`. Rollouts
    without agent rewards give `[None]`.
    """
    named = sorted({agent for rollout in rollouts for agent in rollout.agent_rewards})
    others = any(
        turn.trained and turn.agent not in rollout.agent_rewards for rollout in rollouts for turn in rollout.turns
    )
    return [*named, None] if others or not named else list(named)


def share_of(rollout: Trajectory, agent: str | None) -> Share | None:
    """The part of a rollout that belongs to one agent, or, if `agent` is None, to all agents without their own reward.

    Returns None if the agent has no reward in this rollout.

    Example: turns of a, b, a with the rewards `{"a": 1.0}`: the share of "a" has the places (0, 2) and the reward 1;
    the share of None has the place (1,) and the trajectory's reward.
    """
    own = rollout.agent_rewards
    if not own and agent is None:
        return Share(whole=rollout, view=rollout, places=tuple(range(len(rollout.turns))))
    if agent is not None and agent not in own:
        return None
    places = tuple(
        k for k, turn in enumerate(rollout.turns) if turn.agent == agent or (agent is None and turn.agent not in own)
    )
    reward = rollout.reward if agent is None else own[agent]
    view = rollout.replace(
        turns=tuple(rollout.turns[k] for k in places), reward=reward, agent_rewards={}, num_unrecorded_tokens=0
    )
    return Share(whole=rollout, view=view, places=places)
