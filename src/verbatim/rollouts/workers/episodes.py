"""Creates environments from their names and runs episodes in them, inside a worker."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import ComponentError, RecordError, UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.texts import error_text
from verbatim.core.types import Trajectory
from verbatim.environments.environment import Environment
from verbatim.environments.resolve import create_environment
from verbatim.inference.chat.client import OpenAI
from verbatim.inference.sampler import Sampler
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.renderers.renderer_spec import RendererSpec, renderer_spec
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeTask, LocalRunner, RolloutSetup
from verbatim.rollouts.workers.worker import CannotBeSent, dumped, loaded

LARGEST = 512 * 2**20
"""Maximum size of one pickled episode in bytes."""


@dataclass(frozen=True, kw_only=True)
class RemoteSetup:
    """The settings that the episodes of one environment have in common, as picklable values."""

    env: str
    """The environment's label."""
    name: str
    """The id of a bundled environment, or an import path."""
    args: Mapping[str, Any]
    """The environment's keyword arguments."""
    params: SamplingParams
    limits: EpisodeLimits
    teacher: OpenAI | None = None
    """Chat server that generates the turns, or None if the sampler generates them."""


def packed_plan(
    setups: Mapping[tuple[str, str], RemoteSetup], renderer: Renderer, dumps: Callable[[Any], bytes]
) -> bytes:
    """Pickle the setups (keyed by purpose and label) and the renderer. `dumps` is `pickle.dumps`, or Ray's function
    that replaces it.

    Raises:
        ComponentError: a worker cannot create an environment; the message names the environment.
        UsageError: the renderer cannot be pickled.
    """
    for setup in setups.values():
        refuse_unpicklable(setup.env, setup.name, setup.args, dumps)
    spec = renderer_spec(renderer)
    try:
        return dumps((dict(setups), spec))
    except Exception as error:  # pickling may raise anything
        raise UsageError(
            f"a {type(renderer).__name__} cannot be sent to a worker ({error_text(error)}); make it picklable, or run "
            'episodes here: orchestrator.rollout.backend = "local"'
        ) from error


def refuse_unpicklable(
    label: str, name: str, args: Mapping[str, Any], dumps: Callable[[Any], bytes] = pickle.dumps
) -> None:
    """Check that a worker can create the environment from its name and arguments. Raises ComponentError if it
    cannot."""
    if name.replace(":", ".").startswith("__main__."):
        raise ComponentError(
            f"environment {label!r}: {name} is defined in the main program, from which worker processes cannot import; "
            "move it to its own module and set import_path to that"
        )
    for key, value in args.items():
        try:
            dumps(value)
        except Exception as error:
            raise ComponentError(
                f"environment {label!r}: its argument {key} is a {type(value).__name__}, which cannot be sent to a "
                f"worker process ({error_text(error)}); pass the values that it is made from, "
                "and create it in the environment"
            ) from error


RunEpisode: TypeAlias = Callable[[str, EpisodeTask], Awaitable[bytes]]
"""Function that runs an episode of the environment with this label, and returns the result of `pack`."""


@contextlib.asynccontextmanager
async def open_episodes(packed: bytes, sampler: Sampler) -> AsyncIterator[RunEpisode]:
    """Context manager that creates the environments of a `packed_plan`. Its value is a function that runs an episode.
    Raises UsageError if an environment cannot be imported or created here, or if the renderer created here differs from
    the run's renderer."""
    raise_descriptor_limit()  # not yet done in a process that Ray has started
    plans: Mapping[tuple[str, str], RemoteSetup]
    plans, renderer = pickle.loads(packed)  # noqa: S301  (from the run's process)
    if isinstance(renderer, RendererSpec):
        renderer = renderer.make()
    environments: dict[str, Environment] = {}
    setups: dict[tuple[str, str], RolloutSetup] = {}
    async with contextlib.AsyncExitStack() as stack:
        for key, plan in plans.items():
            what = f"{plan.name} {plan.args!r}"  # train and eval share an environment if its arguments are equal
            if what not in environments:
                environments[what] = create_environment(plan.name, plan.args)
            teacher = None if plan.teacher is None else await stack.enter_async_context(plan.teacher.connect())
            setups[key] = RolloutSetup(
                env=plan.env,
                environment=environments[what],
                sampler=sampler,
                renderer=renderer,
                params=plan.params,
                limits=plan.limits,
                slots=asyncio.Semaphore(),
                teacher=teacher,
            )

        async def run(label: str, task: EpisodeTask) -> bytes:
            setup = setups[task.purpose, label]
            recorder = Recorder(sampler.vocab_size, trajectory_id=task.identity.trajectory_id)
            trajectory = await LocalRunner().run(setup, task, recorder)
            return pack(trajectory, recorder.late)

        yield run


def pack(trajectory: Trajectory, late: RecordError | None) -> bytes:
    """Pack the record of an episode for the run's process. If values that the environment put into `info` or messages
    cannot be pickled, the rest is packed as a failed episode."""
    try:
        return _dumped(trajectory, late)
    except CannotBeSent as why:
        error = trajectory.error or f"environment: its record cannot be sent from the worker: {why}"
    failed = trajectory.replace(error=error, info={})
    for less in (failed, failed.replace(messages=(), tools=())):
        with contextlib.suppress(CannotBeSent):
            return _dumped(less, late)
    raise AssertionError("ids and numbers cannot be pickled")


def _dumped(trajectory: Trajectory, late: RecordError | None) -> bytes:
    found = dumped((trajectory, late))
    if len(found) > LARGEST:
        raise CannotBeSent(f"{len(found):,} bytes; expected at most {LARGEST:,}")
    return found


def unpack(packed: bytes) -> tuple[Trajectory, RecordError | None]:
    """Read the result of `pack`. The returned objects are copies, so they do not pin memory in Ray's object store."""
    trajectory, late = loaded(packed)
    assert isinstance(trajectory, Trajectory)
    return trajectory, late
