"""Runs the episodes of environments with a model behind a chat-completions server, to measure it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.sampling import SamplingParams
from verbatim.core.token_tree import LARGEST_ID
from verbatim.core.types import Trajectory
from verbatim.environments.environment import Environment
from verbatim.inference.chat.client import ChatConnection
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts.chat_loop import ChatLoop
from verbatim.rollouts.episode import run_episode
from verbatim.rollouts.episode_stats import EpisodeStats
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeRunner, EpisodeTask, RolloutSetup
from verbatim.rollouts.seeds import derive_seed


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatRunner(EpisodeRunner):
    """An `EpisodeRunner`: the server takes the turns; tools and environment run on this event loop.

    Every request has a seed of its own, made of the episode's; `extra_body={"seed": None}` sends none.
    """

    connection: ChatConnection
    """To the server."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Goes into every request; None leaves a key out."""

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode."""
        loop = ChatLoop(
            connection=self.connection,
            params=setup.params,
            limits=setup.limits,
            recorder=recorder,
            seed_of=lambda number: derive_seed(task.seed, number) % 2**31,
            extra_body=self.extra_body,
        )
        return await run_episode(
            environment=setup.environment, example=task.example, seed=task.seed, loop=loop, identity=task.identity
        )


def chat_setup(
    env: str,
    environment: Environment,
    runner: ChatRunner,
    *,
    params: SamplingParams,
    limits: EpisodeLimits,
    slots: asyncio.Semaphore,
    episode_stats: EpisodeStats,
) -> RolloutSetup:
    """How an environment's episodes are run with a chat server, which samples and renders by itself."""
    unused: Any = None
    return RolloutSetup(
        env=env,
        environment=environment,
        renderer=unused,
        runner=runner,
        limits=limits,
        slots=slots,
        episode_stats=episode_stats,
        sampler=ScriptedSampler(script=[], vocab_size=LARGEST_ID + 1, context_length=limits.max_context),
        params=dataclasses.replace(params, stop_token_ids=()),  # ids are of another tokenizer
    )
