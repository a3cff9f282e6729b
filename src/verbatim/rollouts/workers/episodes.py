"""The worker's side: environments, made again from their names, and the episodes that run in them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.environments.base import Environment
from verbatim.environments.resolve import create_environment
from verbatim.errors import ComponentError, RecordError, UsageError
from verbatim.inference.base import Sampler, SamplingParams
from verbatim.inference.chat.client import OpenAI
from verbatim.renderers.base import Renderer
from verbatim.renderers.renderer_spec import RendererSpec, renderer_spec
from verbatim.rollouts.loop import EpisodeLimits
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeTask, LocalRunner, RolloutSetup
from verbatim.rollouts.workers.worker import CannotTravel
from verbatim.texts import error_text
from verbatim.types import Trajectory
from verbatim.user_code import is_ctrl_c

LARGEST = 512 * 2**20
"""Bytes of one episode's record, pickled."""


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
    """Who runs instead of the sampler."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodePlan:
    """What a worker's episodes are made from."""

    setups: Mapping[tuple[str, str], RemoteSetup]
    """By purpose ("train", "eval") and label."""
    renderer: Renderer | RendererSpec
    """The renderer of the sampler's model."""


def packed_plan(
    setups: Mapping[tuple[str, str], RemoteSetup], renderer: Renderer, dumps: Callable[[Any], bytes]
) -> bytes:
    """The plan as bytes.

    Args:
        setups: By purpose and label.
        renderer: Of the sampler's model.
        dumps: `pickle.dumps`, or Ray's.

    Raises:
        ComponentError: an environment that a worker cannot make again, named.
        UsageError: a renderer that cannot travel.
    """
    for setup in setups.values():
        refuse_what_cannot_travel(setup.env, setup.name, setup.args, dumps)
    spec = renderer_spec(renderer)
    try:
        return dumps(EpisodePlan(setups=dict(setups), renderer=spec))
    except Exception as error:  # objects raise whatever they like here
        raise UsageError(
            f"a {type(renderer).__name__} cannot travel to a worker ({error_text(error)}); make it picklable, or play "
            'episodes here: orchestrator.rollout.backend = "local"'
        ) from error


def refuse_what_cannot_travel(
    label: str, name: str, args: Mapping[str, Any], dumps: Callable[[Any], bytes] = pickle.dumps
) -> None:
    """An environment is made again in each worker, from its name and its arguments.

    Raises:
        ComponentError: a name that means something else there, or an argument that cannot be pickled.
    """
    if name.replace(":", ".").startswith("__main__."):
        raise ComponentError(
            f"environment {label!r}: {name} is in the program itself, where a worker process cannot import it from; "
            "move it to a module of its own and give that as import_path"
        )
    for key, value in args.items():
        try:
            dumps(value)
        except Exception as error:
            raise ComponentError(
                f"environment {label!r}: its argument {key} is a {type(value).__name__}, which cannot travel to a "
                f"worker process ({error_text(error)}); give what it is made from, and make it in the environment"
            ) from error


class WorkerEpisodes:
    """Plays the episodes of one worker, side by side on its event loop."""

    def __init__(self, setups: Mapping[tuple[str, str], RolloutSetup]) -> None:
        self._setups = setups

    @classmethod
    @contextlib.asynccontextmanager
    async def made(cls, plan: EpisodePlan, sampler: Sampler) -> AsyncIterator[WorkerEpisodes]:
        """Everything that episodes need, for as long as the block lasts.

        Raises:
            UsageError: an environment cannot be imported or made here, or the renderer is another one here.
        """
        renderer = plan.renderer.make() if isinstance(plan.renderer, RendererSpec) else plan.renderer
        environments: dict[str, Environment] = {}
        setups: dict[tuple[str, str], RolloutSetup] = {}
        async with contextlib.AsyncExitStack() as stack:
            for key, setup in plan.setups.items():
                what = f"{setup.name} {setup.args!r}"  # training and evaluation share one that is made alike
                if what not in environments:
                    environments[what] = create_environment(setup.name, setup.args)
                teacher = None
                if setup.teacher is not None:
                    teacher = await stack.enter_async_context(setup.teacher.connect())
                setups[key] = RolloutSetup(
                    env=setup.env, environment=environments[what], sampler=sampler, renderer=renderer,
                    params=setup.params, limits=setup.limits, slots=asyncio.Semaphore(), teacher=teacher,
                )  # fmt: skip
            yield cls(setups)

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """The finished episode, packed."""
        setup = self._setups[task.purpose, label]
        recorder = Recorder(setup.sampler.vocab_size, trajectory_id=task.identity.trajectory_id)
        trajectory = await LocalRunner().run(setup, task, recorder)
        return pack(trajectory, recorder.late)


def pack(trajectory: Trajectory, late: RecordError | None) -> bytes:
    """An episode's record, pickled by this process and read by the run's.

    What the environment put into `info` and the messages may be unable to travel. Then the rest does, as a failed
    episode.
    """
    whole = _dumped(trajectory, late)
    if isinstance(whole, bytes):
        return whole
    error = trajectory.error or f"environment: what it recorded cannot travel from its worker: {whole}"
    failed = trajectory.replace(error=error, info={})
    for less in (failed, failed.replace(messages=(), tools=())):
        rest = _dumped(less, late)
        if isinstance(rest, bytes):
            return rest
    raise AssertionError(f"ids and numbers cannot be pickled: {rest!r}")


def _dumped(trajectory: Trajectory, late: RecordError | None) -> bytes | str:
    """The bytes, or why there are none."""
    try:
        found = pickle.dumps((trajectory, late), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        return error_text(error, 500)
    return found if len(found) <= LARGEST else f"{len(found):,} bytes; expected at most {LARGEST:,}"


def unpack(packed: bytes) -> tuple[Trajectory, RecordError | None]:
    """What `pack` wrote. Bytes become objects of this process's own, which pin no memory of Ray's.

    Raises:
        CannotTravel: an object of the environment's refuses to be made again.
    """
    try:
        trajectory, late = pickle.loads(packed)  # noqa: S301  (from a process that we started)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise CannotTravel(error_text(error, 500)) from error
    assert isinstance(trajectory, Trajectory)
    return trajectory, late
