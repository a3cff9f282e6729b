"""Defines the record of one episode: every turn as exact ids, the conversation, and the reward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from verbatim.core.errors import RecordError
from verbatim.core.records.fields import as_number, fill
from verbatim.core.records.identity import RolloutIdentity
from verbatim.core.records.messages import Message, StopReason
from verbatim.core.records.turn import Turn
from verbatim.core.token_tree import Segment, TokenTree
from verbatim.core.trajectories.openings import breaks


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRecord:
    """The fields and properties of a `Trajectory`, without the mapping view that `Trajectory` adds.

    Raises:
        RecordError: a reward, a part of a reward or an advantage is not a single number.
    """

    example_id: str
    """Id of the example."""
    turns: tuple[Turn, ...] = ()
    """All requests with their responses, including the turns of sub-agents, in the order of sampling."""
    messages: tuple[Message, ...] = ()
    """The conversation of the main agent (or of the first agent, if there is no main agent), for people and tools;
    never the source of ids."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tool schemas that the caller passed next to `messages`; empty if they came from the tool manager."""
    reward: float | None = None
    """The reward, or None if the episode was never scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, if the environment gives them."""
    agent_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single agents, if the environment gives them. The turns of these agents get credit from these rewards,
    all other turns from `reward`."""
    env: str = ""
    """The name of the episode's environment."""
    trajectory_id: str = ""
    """Id of the trajectory, unique within the run."""
    run_id: str = ""
    """Name of the run's folder; empty outside of a run."""
    group_id: str = ""
    """Id of the trajectory's group."""
    sample_index: int = 0
    """The trajectory's index in the group."""
    seed: int | None = None
    """The seed for sampling the episode, or None if it has no seed."""
    advantage: float | None = None
    """The advantage of the episode's sampled tokens, except in turns for which `Turn.advantage` is set."""
    stop_reason: StopReason | None = None
    """Why the episode ended."""
    truncated: bool = False
    """True if something was cut off."""
    error: str | None = None
    """The error message of a failed episode, or None. A trajectory with an error is never trained on."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON values from the environment. `info["task"]` is what the caller of a rollout passed next to
    `messages`."""
    num_unrecorded_tokens: int = 0
    """Number of sampled tokens that are in no turn, because their completion was cut off, or because it could not be
    recorded (in which case `error` has the reason)."""
    num_unrecorded_turns: int = 0
    """Number of turns that a server answered without token ids. These turns are in `messages`, but are never
    trained."""

    def __post_init__(self) -> None:
        fill(
            self,
            turns=_in_one_tree(self.turns),
            messages=tuple(self.messages),
            tools=tuple(self.tools),
            reward=as_number(self.reward, "reward", "; a turn's own goes into Turn(reward=...)"),
            advantage=as_number(self.advantage, "advantage", "; a turn's own goes into Turn(advantage=...)"),
            stop_reason=None if self.stop_reason is None else StopReason(self.stop_reason),
        )
        if not isinstance(self.reward_parts, Mapping):
            raise RecordError(f"reward_parts: {self.reward_parts!r:.80}; expected a mapping of names to numbers")
        if not isinstance(self.agent_rewards, Mapping):
            raise RecordError(f"agent_rewards: {self.agent_rewards!r:.80}; expected a mapping of names to numbers")
        for field_name in ("reward_parts", "agent_rewards"):
            named = getattr(self, field_name)
            if len(set(map(str, named))) < len(named):
                raise RecordError(f"{field_name}: {named!r:.80}; two names have the same text, expected distinct names")
            for name, part in named.items():
                if as_number(part, f"{field_name}[{name!r}]") is None:
                    raise RecordError(f"{field_name}[{name!r}]: None; leave out names that were not scored")

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the sampler produced."""
        return sum(len(turn.completion_ids) for turn in self.turns) + self.num_unrecorded_tokens

    @property
    def num_stored_tokens(self) -> int:
        """Number of ids held in memory. Each distinct (prefix, token) is held once, so this is O(L) for a trajectory of
        L tokens."""
        segments: set[Segment] = set()
        for turn in self.turns:
            segment = turn.path.segment
            while segment is not None and segment not in segments:
                segments.add(segment)
                segment = segment.parent
        return sum(len(segment.ids) for segment in segments)

    @property
    def bad_reward(self) -> str | None:
        """Why nothing can be learned from the rewards (missing, NaN or infinite), or None if they are usable."""
        if self.reward is None:
            return "reward: missing"
        turns = (turn.reward for turn in self.turns if turn.reward is not None)
        rewards = [self.reward, *self.agent_rewards.values(), *turns]
        bad = next((reward for reward in rewards if not math.isfinite(reward)), None)
        return None if bad is None else f"reward: {bad} is not finite"

    @property
    def num_breaks(self) -> int:
        """Number of turns whose prompt extends no open sample exactly although their agent has sampled before."""
        return len(breaks(self.turns))

    @classmethod
    def of(cls, identity: RolloutIdentity, **fields: Any) -> Self:
        """The trajectory of the rollout with this identity; `fields` are the other fields."""
        return cls(**vars(identity), **fields)

    @property
    def identity(self) -> RolloutIdentity:
        """The identity of the trajectory's rollout."""
        return RolloutIdentity(**{f.name: getattr(self, f.name) for f in dataclasses.fields(RolloutIdentity)})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _in_one_tree(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Put turns into one tree, so that their paths can be compared. Turns of an episode already share a tree."""
    turns = tuple(turns)
    if len({turn.path.tree for turn in turns}) <= 1:
        return turns
    tree = TokenTree()
    shared = []
    for turn in turns:
        path, completion_ids = tree.add(turn.prompt_ids, turn.completion_ids)
        shared.append(dataclasses.replace(turn, path=path, completion_ids=completion_ids))
    return tuple(shared)
