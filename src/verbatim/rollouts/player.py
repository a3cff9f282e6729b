"""Who plays an episode: what all episodes of one environment share, what one episode is, and playing it right here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verbatim.environments.base import Environment
from verbatim.inference.base import Sampler, SamplingParams
from verbatim.inference.openai import Connection
from verbatim.renderers.base import Renderer
from verbatim.rollouts.episode import run_episode
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.tally import EpisodeTally
from verbatim.rollouts.teacher_loop import TeacherLoop
from verbatim.rollouts.turn_loop import AgentLoop, EpisodeLimits
from verbatim.types import Example, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeTask:
    """One episode, in values that can travel."""

    purpose: str
    """"train" or "eval"."""
    example: Example
    """What it is about."""
    seed: int
    """Of its sampling and of its environment."""
    session: str
    """What its requests to the sampler are known by."""
    identity: Mapping[str, Any]
    """`trajectory_id`, `group_id`, `sample_index`, `env` and `seed` of the record."""


class Player(Protocol):
    """Takes one episode to its end."""

    async def play(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode; what goes wrong in it is on the trajectory.

        Args:
            setup: Of the episode's environment.
            task: Which episode.
            recorder: Is told of every sampled token as it appears.
        """

    def metrics(self) -> Mapping[str, float]:
        """How playing goes, for the metrics of a step."""


class LocalPlayer:
    """Plays on the running event loop."""

    async def play(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode."""
        loop: AgentLoop | TeacherLoop
        if setup.teacher is None:
            loop = AgentLoop(
                sampler=setup.sampler, renderer=setup.renderer, params=setup.params, limits=setup.limits,
                recorder=recorder, seed=task.seed, session=task.session,
            )  # fmt: skip
        else:
            loop = TeacherLoop(
                connection=setup.teacher, renderer=setup.renderer, params=setup.params, limits=setup.limits,
                recorder=recorder, seed=task.seed,
            )  # fmt: skip
        return await run_episode(
            environment=setup.environment, example=task.example, seed=task.seed, loop=loop, recorder=recorder,
            limits=setup.limits, identity=task.identity,
        )  # fmt: skip

    def metrics(self) -> Mapping[str, float]:
        """None of its own."""
        return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutSetup:
    """What all episodes of one environment share."""

    env: str
    """The environment's label."""
    environment: Environment
    sampler: Sampler
    renderer: Renderer
    params: SamplingParams
    limits: EpisodeLimits
    slots: asyncio.Semaphore
    """Bounds the episodes in flight, over all environments."""
    teacher: Connection | None = None
    """Who plays instead of the sampler; None = the sampler does."""
    player: Player = field(default_factory=LocalPlayer)
    """Where the episodes are played."""
    tally: EpisodeTally = field(default_factory=EpisodeTally)
    """Counts how they end, and says what fails."""
