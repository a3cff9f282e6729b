"""Runs episodes of environments with a model behind a chat-completions server, in order to evaluate the model."""

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
    """An `EpisodeRunner` that samples from a chat server. Tools and the environment run on this event loop.

    Every request gets its own seed, derived from the episode's seed; with `extra_body={"seed": None}` no seed is sent.
    """

    connection: ChatConnection
    """Connection to the server."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are merged into every request; a value of None removes the key."""

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """Run the episode, and return its trajectory."""
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
    """Build the setup for an environment's episodes with a model behind a chat server. The server renders and samples,
    so the setup's sampler is only a placeholder: only its vocabulary size and its context length are read."""
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
        params=dataclasses.replace(params, stop_token_ids=()),  # the server's tokenizer has other ids
    )
