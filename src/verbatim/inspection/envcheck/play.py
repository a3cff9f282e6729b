"""Plays episodes of an environment with players in place of the model. Players answer with messages, not with
tokens."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import ModelError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Example, Message, StopReason, Trajectory
from verbatim.environments.environment import Environment, Episode
from verbatim.environments.tools.tool import Tool
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inspection.envcheck.players import Player, has_solution
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.episode import EpisodeRun
from verbatim.rollouts.episode_stats import EpisodeStats
from verbatim.rollouts.group import GroupRun
from verbatim.rollouts.loop import EpisodeLoop, Prompt, SampledAnswer
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeTask, RolloutSetup

_MANY = 2**20
"""Size of the made-up vocabulary. Each turn is recorded as a single token, whose id is the number of the turn."""

MakePlayer = Callable[[int], Player]
"""A function that takes the seed of an episode and returns the player for that episode."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayedEpisode:
    """One finished episode."""

    player: str
    """The kind of player: "random", "solution", "demonstration"."""
    example: Example
    trajectory: Trajectory
    opening: Sequence[Message]
    """The messages with which the episode began."""
    tools: Mapping[str, Tool]
    """All tools that were offered in any turn, keyed by name."""
    has_solution: bool
    """True if the episode has a `solution` method."""

    def transcript(self) -> str:
        """Everything in the episode that the seed should determine, as text."""
        t = self.trajectory
        told = {
            "messages": t.messages,
            "reward": t.reward,
            "parts": t.reward_parts,
            "ended": t.stop_reason,
            "error": t.error,
            "state_keys": [turn.state_key for turn in t.turns],
            "turn_rewards": [turn.reward for turn in t.turns],
        }
        return json.dumps(told, default=repr, ensure_ascii=False)


class PlayLoop(EpisodeLoop):
    """Answers prompts with a player's messages.

    Each turn is recorded with one made-up token id, so that rewards and state keys are handled in the same way as in a
    run.
    """

    engine = "player"

    def __init__(self, player: Player, *, limits: EpisodeLimits, recorder: Recorder) -> None:
        super().__init__(limits=limits, recorder=recorder)
        self._player = player
        self.tools: dict[str, Tool] = {}

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        agent: str = "main",
        state_key: str | None = None,
        *,
        trained: bool = True,
    ) -> Message:
        """Play one turn, and remember the offered tools for the report."""
        self.tools |= {tool.name: tool for tool in tools}
        return await super().sample(messages, tools, agent, state_key, trained=trained)

    async def complete(self, *given: Any, **more: Any) -> Any:
        """Reject requests with exact token ids.

        Raises:
            ModelError: always, because a player has no token ids.
        """
        raise ModelError(
            "the environment requests completions of exact token ids, which only a model can give, so it cannot be "
            "checked without a model; measure a model on it with `verbatim eval`"
        )

    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        number = self._begin_turn()
        await asyncio.sleep(0)  # let other episodes run, as they would during sampling
        said = self._player.say(prompt.messages, prompt.schemas)
        said = dataclasses.replace(said, tool_calls=tuple(map(self._identify, said.tool_calls)))
        self.recorder.count(1)
        return SampledAnswer(
            message=said.message(),
            tool_calls=said.tool_calls,
            stop_reason=StopReason.STOP,
            prompt_ids=[number + 1],
            completion_ids=[0],
        )


@dataclass(kw_only=True)
class CheckedEnvironment:
    """The environment that is being checked, with the limits of its episodes."""

    name: str
    environment: Environment
    limits: EpisodeLimits
    plays: list[PlayedEpisode] = field(default_factory=list)
    """All episodes played so far, except episodes played with `keep=False`."""

    async def play(
        self, player: str, make: Sequence[MakePlayer], example: Example, *, index: int = 0, keep: bool = True
    ) -> list[PlayedEpisode]:
        """Play one group of episodes of an example concurrently, one episode for each player.

        The same index gives the same seeds. If `keep` is False, the episodes are not added to `plays`.
        """
        runner = _Runner(make)
        setup = RolloutSetup(
            env=self.name,
            environment=self.environment,
            limits=self.limits,
            params=SamplingParams(),
            sampler=ScriptedSampler(script=[], vocab_size=_MANY, context_length=_MANY),
            renderer=cast(Renderer, None),
            slots=asyncio.Semaphore(len(make)),
            runner=runner,
            episode_stats=SilentStats(),
        )
        group = await GroupRun(setup, example, index=index, size=len(make), run_seed=0, purpose="check").run()
        plays = [
            PlayedEpisode(player=player, example=example, trajectory=trajectory, **runner.seen[trajectory.sample_index])
            for trajectory in group.trajectories
        ]
        self.plays += plays if keep else []
        return plays


class _Runner:
    """Runs the n-th episode of a group with the n-th player."""

    def __init__(self, make: Sequence[MakePlayer]) -> None:
        self._make = make
        self.seen: dict[int, dict[str, Any]] = {}

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        player = self._make[task.identity.sample_index](task.seed)
        loop = PlayLoop(player, limits=setup.limits, recorder=recorder)
        opening: list[Message] = []
        solvable: list[bool] = []

        async def start() -> Episode:
            episode = await setup.environment.start(task.example, task.seed)
            solvable.append(has_solution(episode))
            player.meet(episode)
            opening.extend(copy.deepcopy(list(getattr(episode, "messages", ()))))
            return episode

        episode = EpisodeRun(start, loop, task.identity)
        await episode.run()
        self.seen[task.identity.sample_index] = {
            "opening": opening,
            "tools": loop.tools,
            "has_solution": any(solvable),
        }
        return episode.trajectory()

    def metrics(self) -> Mapping[str, float]:
        return {}


class SilentStats(EpisodeStats):
    """Does not log failures, because the report of the check lists them."""

    def ended(self, trajectory: Trajectory) -> None:
        pass

    def failed(self, trajectory: Trajectory) -> None:
        pass
