"""Creates environments from their names and runs episodes in them, inside a worker."""

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
from verbatim.rollouts.workers.worker import CannotBeSent
from verbatim.texts import error_text
from verbatim.types import Trajectory
from verbatim.user_code import is_ctrl_c

LARGEST = 512 * 2**20
"""Most bytes of one pickled episode."""


@dataclass(frozen=True, kw_only=True)
class RemoteSetup:
    """Settings shared by the episodes of one environment, in picklable values."""

    env: str
    """The environment's label."""
    name: str
    """A bundled id, or an import path."""
    args: Mapping[str, Any]
    """The environment's keyword arguments."""
    params: SamplingParams
    """Sampling parameters."""
    limits: EpisodeLimits
    """Limits of turns, tokens and time."""
    teacher: OpenAI | None = None
    """A chat client that answers in place of the sampler; None = the sampler."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodePlan:
    """Setups and renderer of a worker's episodes."""

    setups: Mapping[tuple[str, str], RemoteSetup]
    """Setups by purpose ("train", "eval") and label."""
    renderer: Renderer | RendererSpec
    """The renderer of the sampler's model."""


def packed_plan(
    setups: Mapping[tuple[str, str], RemoteSetup], renderer: Renderer, dumps: Callable[[Any], bytes]
) -> bytes:
    """The plan as bytes.

    Args:
        setups: Setups by purpose and label.
        renderer: The renderer of the sampler's model.
        dumps: `pickle.dumps`, or Ray's.

    Raises:
        ComponentError: an environment that a worker cannot create; names it.
        UsageError: a renderer that cannot be pickled.
    """
    for setup in setups.values():
        refuse_unpicklable(setup.env, setup.name, setup.args, dumps)
    spec = renderer_spec(renderer)
    try:
        return dumps(EpisodePlan(setups=dict(setups), renderer=spec))
    except Exception as error:  # pickling raises anything
        raise UsageError(
            f"a {type(renderer).__name__} cannot be sent to a worker ({error_text(error)}); make it picklable, or run "
            'episodes here: orchestrator.rollout.backend = "local"'
        ) from error


def refuse_unpicklable(
    label: str, name: str, args: Mapping[str, Any], dumps: Callable[[Any], bytes] = pickle.dumps
) -> None:
    """Check that each worker can create the environment from its name and arguments.

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
                f"environment {label!r}: its argument {key} is a {type(value).__name__}, which cannot be sent to a "
                f"worker process ({error_text(error)}); give what it is made from, and make it in the environment"
            ) from error


class WorkerEpisodes:
    """Runs the episodes of one worker concurrently on its event loop."""

    def __init__(self, setups: Mapping[tuple[str, str], RolloutSetup]) -> None:
        self._setups = setups

    @classmethod
    @contextlib.asynccontextmanager
    async def made(cls, plan: EpisodePlan, sampler: Sampler) -> AsyncIterator[WorkerEpisodes]:
        """Context manager that creates everything that episodes need.

        Raises:
            UsageError: an environment cannot be imported or created here, or the renderer differs.
        """
        renderer = plan.renderer.make() if isinstance(plan.renderer, RendererSpec) else plan.renderer
        environments: dict[str, Environment] = {}
        setups: dict[tuple[str, str], RolloutSetup] = {}
        async with contextlib.AsyncExitStack() as stack:
            for key, setup in plan.setups.items():
                what = f"{setup.name} {setup.args!r}"  # one environment for equal arguments
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
        """Run an episode; returns it packed."""
        setup = self._setups[task.purpose, label]
        recorder = Recorder(setup.sampler.vocab_size, trajectory_id=task.identity.trajectory_id)
        trajectory = await LocalRunner().run(setup, task, recorder)
        return pack(trajectory, recorder.late)


def pack(trajectory: Trajectory, late: RecordError | None) -> bytes:
    """Pickle an episode's record for the run's process.

    If values of the environment in `info` or messages cannot be pickled, the rest is packed as a failed episode.
    """
    whole = _dumped(trajectory, late)
    if isinstance(whole, bytes):
        return whole
    error = trajectory.error or f"environment: what it recorded cannot be sent from its worker: {whole}"
    failed = trajectory.replace(error=error, info={})
    for less in (failed, failed.replace(messages=(), tools=())):
        rest = _dumped(less, late)
        if isinstance(rest, bytes):
            return rest
    raise AssertionError(f"ids and numbers cannot be pickled: {rest!r}")


def _dumped(trajectory: Trajectory, late: RecordError | None) -> bytes | str:
    """The bytes, or the error's text."""
    try:
        found = pickle.dumps((trajectory, late), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        return error_text(error, 500)
    return found if len(found) <= LARGEST else f"{len(found):,} bytes; expected at most {LARGEST:,}"


def unpack(packed: bytes) -> tuple[Trajectory, RecordError | None]:
    """Read the result of `pack`. The objects are copies that pin no memory of Ray's.

    Raises:
        CannotBeSent: an object of the environment cannot be unpickled.
    """
    try:
        trajectory, late = pickle.loads(packed)  # noqa: S301  (from our own child process)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise CannotBeSent(error_text(error, 500)) from error
    assert isinstance(trajectory, Trajectory)
    return trajectory, late
