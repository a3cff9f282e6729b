"""Defines episode tasks, the settings that the episodes of one environment share, and the local runner."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.records.experts import Routing
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Example, RolloutIdentity, Trajectory
from verbatim.environments.environment import Environment
from verbatim.inference.chat.client import ChatConnection
from verbatim.inference.sampler import Sampler
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.chat_loop import TeacherLoop
from verbatim.rollouts.episode import run_episode
from verbatim.rollouts.episode_stats import EpisodeStats
from verbatim.rollouts.loop import EpisodeLoop
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.turn_limiter import turn_limiter


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeTask:
    """One episode, as picklable values."""

    purpose: str
    """"train" or "eval"."""
    example: Example
    """What it is about."""
    session: str
    """Names the episode in its requests to the sampler, which may keep its cache by it."""
    identity: RolloutIdentity
    """Which rollout it is. Its seed is that of the sampling and of the environment."""

    @property
    def seed(self) -> int:
        """The identity's seed: every episode has one."""
        assert self.identity.seed is not None
        return self.identity.seed


class EpisodeRunner(Protocol):
    """Takes one episode to its end."""

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode; what goes wrong in it is on the trajectory. The recorder counts every sampled token as
        it appears."""

    def metrics(self) -> Mapping[str, float]:
        """The runner's own metrics of a step; here none."""
        return {}


class LocalRunner(EpisodeRunner):
    """Runs episodes on the running event loop."""

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode."""
        await turn_limiter().enter()
        return await run_episode(
            environment=setup.environment,
            example=task.example,
            seed=task.seed,
            loop=_loop(setup, task, recorder),
            identity=task.identity,
        )


def _loop(setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> EpisodeLoop:
    if setup.teacher is None:
        return AgentLoop(
            sampler=setup.sampler,
            renderer=setup.renderer,
            params=setup.params,
            limits=setup.limits,
            recorder=recorder,
            seed=task.seed,
            session=task.session,
        )
    return TeacherLoop(
        connection=setup.teacher,
        renderer=setup.renderer,
        limits=setup.limits,
        recorder=recorder,
        # The teacher ends a turn by itself: stop tokens are ids of the student's, and what a stop string cut off would
        # be imitated with the close of a whole turn.
        params=dataclasses.replace(setup.params, stop_token_ids=(), stop=()),
        seed_of=lambda number: derive_seed(task.seed, number) % 2**31,
    )


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
    teacher: ChatConnection | None = None
    """The chat server that takes the turns in the sampler's place; None: the sampler takes them."""
    runner: EpisodeRunner = field(default_factory=LocalRunner)
    """Where the episodes run."""
    episode_stats: EpisodeStats = field(default_factory=EpisodeStats)
    """Counts how they end, and says what fails."""
    run_id: str = ""
    """The run that the episodes belong to; empty outside of one."""
    routing: Routing | None = None
    """The routing of the model in training, whose experts the sampler returns; None: they are not returned."""
