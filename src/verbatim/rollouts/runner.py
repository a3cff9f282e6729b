"""Defines episode tasks, the setup that the episodes of one environment share, and the local runner."""

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
    """One episode to run, as picklable values."""

    purpose: str
    """The purpose of the episode: "train" or "eval"."""
    example: Example
    """The example to play."""
    session: str
    """Session id of the episode's requests. A sampler may keep its prefix cache by session id."""
    identity: RolloutIdentity
    """Identity of the rollout. The identity's seed is used for the sampling and for the environment."""

    @property
    def seed(self) -> int:
        """The seed in `identity`. Every episode has a seed."""
        assert self.identity.seed is not None
        return self.identity.seed


class EpisodeRunner(Protocol):
    """Runs episodes in some process."""

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """Run one episode, and return its trajectory, in which failures are recorded too. The recorder counts every
        token as it is sampled."""

    def metrics(self) -> Mapping[str, float]:
        """Return the runner's own metrics of a step. The default returns no metrics."""
        return {}


class LocalRunner(EpisodeRunner):
    """Runs episodes on the running event loop."""

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """Run one episode, and return its trajectory."""
        # Many slots may become free at once. The limiter spreads the starts over passes of the event loop.
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
        # The teacher ends its turns itself: stop tokens are ids of the student and not of the teacher. Stop strings are
        # not used either: text that was cut at one would be rendered with a close token, and the student would learn to
        # end the turn there.
        params=dataclasses.replace(setup.params, stop_token_ids=(), stop=()),
        seed_of=lambda number: derive_seed(task.seed, number) % 2**31,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutSetup:
    """The settings and objects that all episodes of one environment share."""

    env: str
    """The environment's label."""
    environment: Environment
    sampler: Sampler
    renderer: Renderer
    params: SamplingParams
    limits: EpisodeLimits
    slots: asyncio.Semaphore
    """Limits the number of episodes in flight, over all environments together."""
    teacher: ChatConnection | None = None
    """Chat server that generates the turns, or None if the sampler generates them."""
    runner: EpisodeRunner = field(default_factory=LocalRunner)
    """Runs the episodes, and so decides in which process they run."""
    episode_stats: EpisodeStats = field(default_factory=EpisodeStats)
    """Counts the episodes that have ended, and logs failures."""
    run_id: str = ""
    """Id of the run to which the episodes belong; "" outside a run."""
    routing: Routing | None = None
    """Routing of the model in training, for checking the experts that the sampler returns; None if it returns no
    experts."""
