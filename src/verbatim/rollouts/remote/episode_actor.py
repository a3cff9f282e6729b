"""The worker's side: environments, made again from their names, and the episodes that are played in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.environments.base import Environment
from verbatim.environments.resolve import create_environment
from verbatim.inference.base import Sampler, SamplingParams
from verbatim.inference.http_sampler import HttpSampler
from verbatim.inference.openai import OpenAI
from verbatim.renderers.base import Renderer
from verbatim.rollouts.player import EpisodeTask, LocalPlayer, RolloutSetup
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.remote.place import Place
from verbatim.rollouts.remote.recipe import RendererRecipe
from verbatim.rollouts.turn_loop import EpisodeLimits


@dataclass(frozen=True, kw_only=True)
class RemoteSetup:
    """What all episodes of one environment share, in values that can travel."""

    env: str
    """The environment's label."""
    name: str
    """A bundled id, or an import path."""
    args: Mapping[str, Any]
    """The environment's keyword arguments."""
    params: SamplingParams
    """How tokens are drawn."""
    limits: EpisodeLimits
    """Where episodes are cut off."""
    teacher: OpenAI | None = None
    """Who plays instead of the sampler."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ActorPlan:
    """What every actor of a run is made from."""

    setups: Mapping[tuple[str, str], RemoteSetup]
    """By purpose and label."""
    renderer: Renderer | RendererRecipe
    """Of the sampler's model."""
    url: str
    """The sampler's address."""
    api_key: str
    """The key to it."""
    place: Place
    """Where the driver stands."""


class EpisodeActor:
    """Plays episodes side by side on the event loop of a process of Ray's."""

    def __init__(self, plan: bytes, place: Place) -> None:
        place.go()
        self._packed = plan
        self._setups: dict[tuple[str, str], RolloutSetup] = {}
        self._open = contextlib.AsyncExitStack()

    async def prepare(self) -> int:
        """Make everything that episodes need. Returns the id of this process.

        Raises:
            ComponentError: an environment cannot be imported or made on this host.
            SamplerFault: the sampler cannot be reached from it.
        """
        from ray import cloudpickle

        plan: ActorPlan = cloudpickle.loads(self._packed)
        sampler = await HttpSampler.connect(plan.url, api_key=plan.api_key)
        renderer = plan.renderer.make() if isinstance(plan.renderer, RendererRecipe) else plan.renderer
        environments: dict[str, Environment] = {}
        for key, setup in plan.setups.items():
            what = f"{setup.name} {setup.args!r}"  # training and evaluation share one that is made alike
            if what not in environments:
                environments[what] = create_environment(setup.name, setup.args)
            self._setups[key] = await self._make(setup, environments[what], sampler, renderer)
        return os.getpid()

    async def _make(
        self, setup: RemoteSetup, environment: Environment, sampler: Sampler, renderer: Renderer
    ) -> RolloutSetup:
        teacher = None
        if setup.teacher is not None:
            teacher = await self._open.enter_async_context(setup.teacher.connect())
        return RolloutSetup(
            env=setup.env, environment=environment, sampler=sampler, renderer=renderer, params=setup.params,
            limits=setup.limits, slots=asyncio.Semaphore(), teacher=teacher,
        )  # fmt: skip

    async def play(self, label: str, task: EpisodeTask) -> bytes:
        """The finished episode, pickled: bytes become objects of the driver's own, which pin no memory of Ray's."""
        setup = self._setups[task.purpose, label]
        recorder = Recorder(setup.sampler.vocab_size, trajectory_id=task.identity["trajectory_id"])
        trajectory = await LocalPlayer().play(setup, task, recorder)
        try:
            return pickle.dumps((trajectory, recorder.late), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  (what the environment put into `info` raises what it likes)
            reason = f"environment: its info cannot travel from the actor: {type(error).__name__}: {error}"
            kept = trajectory.replace(info={}, error=trajectory.error or reason)
            return pickle.dumps((kept, recorder.late), protocol=pickle.HIGHEST_PROTOCOL)
