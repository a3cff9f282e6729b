"""Episodes spread over Ray actors; those of an actor that is lost are played again elsewhere, from their own seeds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import pickle
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.errors import RecordError, RunStopped, SamplerFault, UsageError
from verbatim.inference.base import Sampler
from verbatim.inference.server import serve_sampler
from verbatim.renderers.base import Renderer
from verbatim.rollouts.group import run_together
from verbatim.rollouts.player import EpisodeTask, RolloutSetup
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.remote.cluster import ray_running
from verbatim.rollouts.remote.counted import CountedSampler, Try
from verbatim.rollouts.remote.episode_actor import ActorPlan, EpisodeActor, RemoteSetup
from verbatim.rollouts.remote.place import Place
from verbatim.rollouts.remote.recipe import describe_renderer
from verbatim.types import StopReason, Trajectory

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for an actor to be placed on a host and to make its environments."""
GRACE = 60.0
"""Seconds after an episode's deadline; an actor that has not ended it by then is stuck, and taken for lost."""
MOST_TRIES = 3
"""Actors that an episode may lose before it fails: it may be what kills them."""


@contextlib.asynccontextmanager
async def ray_player(
    setups: Mapping[tuple[str, str], RemoteSetup],
    sampler: Sampler,
    renderer: Renderer,
    *,
    workers: int,
    cpus_per_worker: float = 1.0,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[ActorPool]:
    """A `Player` on Ray actors for as long as the block lasts; the sampler stays in this process and is served to them.

    Args:
        setups: By purpose ("train", "eval") and label.
        sampler: Whose tokens.
        renderer: Of its model.
        workers: Actors.
        cpus_per_worker: What each takes of its host's.
        address: Of the Ray cluster; None starts Ray here.
        host: This machine's address, as the actors' hosts know it.
        port: Of the sampler; 0 takes a free one.

    Raises:
        UsageError: Ray or the actors cannot be started; says why.
    """
    counted, key, place = CountedSampler(sampler), secrets.token_urlsafe(24), Place.here()
    with ray_running(address, num_cpus=max(1, math.ceil(workers * cpus_per_worker))) as ray:
        async with serve_sampler(counted, host=host, port=port, api_key=key) as server:
            plan = ActorPlan(
                setups=setups, renderer=describe_renderer(renderer), url=server.url, api_key=key, place=place
            )
            pool = ActorPool(ray, plan, counted, workers=workers, cpus_per_worker=cpus_per_worker)
            try:
                await pool.start()
                yield pool
            finally:
                await pool.close()


@dataclass(eq=False)
class _Actor:
    """One worker process."""

    handle: Any
    pid: int
    num_playing: int = 0


class _ActorLost(Exception):
    """An episode has no actor any more."""


class ActorPool:
    """A `Player`: each episode goes to the actor that plays the fewest."""

    def __init__(
        self, ray: Any, plan: ActorPlan, sampler: CountedSampler, *, workers: int, cpus_per_worker: float
    ) -> None:
        self._ray = ray
        self._sampler = sampler
        self._workers = workers
        self._packed: bytes = ray.cloudpickle.dumps(plan)
        self._place = plan.place
        # Ray bounds the calls of an actor; here the run does, by orchestrator.max_concurrent.
        options = {"num_cpus": cpus_per_worker, "scheduling_strategy": "SPREAD", "max_concurrency": 100_000}
        self._make = ray.remote(EpisodeActor).options(**options).remote
        errors = ray.exceptions
        # A task that was cancelled, and not by us, was in a process that is being ended.
        self._signs_of_loss = (
            errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError, errors.TaskCancelledError,
            TimeoutError,
        )  # fmt: skip
        self._actors: list[_Actor] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._why = ""
        self.num_lost = 0
        """Actors lost so far."""
        self.num_played_again = 0
        """Episodes begun anew so far, because their actor was lost."""

    @property
    def pids(self) -> list[int]:
        """The process of each actor, on its host."""
        return [actor.pid for actor in self._actors]

    def metrics(self) -> Mapping[str, float]:
        """The actors there are; and since the start, those that were lost and the episodes that were played again."""
        return {
            "rollout/actors": len(self._actors), "rollout/actors_lost": self.num_lost,
            "rollout/episodes_played_again": self.num_played_again,
        }  # fmt: skip

    async def start(self) -> None:
        """Start every actor.

        Raises:
            UsageError: one cannot be started.
        """
        await run_together(self._add() for _ in range(self._workers))

    async def close(self) -> None:
        """End every actor."""
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._actors.clear()

    async def play(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode, by whichever actor ends it.

        Raises:
            RunStopped: no actor is left, and no other can be started.
        """
        for number in range(MOST_TRIES):
            actor = await self._least_busy()
            self.num_played_again += number > 0
            with contextlib.suppress(_ActorLost):
                return await self._play_on(actor, setup, task, recorder)
        return _unplayed(
            task, recorder, f"actor: {MOST_TRIES} actors were lost while they played it; the last one: {self._why}"
        )

    async def _least_busy(self) -> _Actor:
        while not self._actors:
            if not self._starting:
                raise RunStopped(f"no Ray actor is left to play episodes, and no other can be started: {self._why}")
            self._changed.clear()
            await self._changed.wait()
        return min(self._actors, key=lambda actor: actor.num_playing)

    async def _play_on(self, actor: _Actor, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        current = self._sampler.open(recorder)
        actor.num_playing += 1
        try:
            answer = actor.handle.play.remote(setup.env, dataclasses.replace(task, session=current.session))
        except Exception as error:  # noqa: BLE001  (what the environment put into the example raises what it likes)
            actor.num_playing -= 1
            self._sampler.close_try(current)
            return _unplayed(task, recorder, f"environment: the example cannot travel to an actor: {_short(error)}")
        try:
            async with asyncio.timeout(setup.limits.timeout + GRACE):
                packed: bytes = await answer
        except asyncio.CancelledError:
            self._ray.cancel(answer)
            await current.give_up()
            raise
        except self._signs_of_loss as error:
            self._lose(actor, error)
            await current.give_up()
            recorder.lose(current.num_tokens)
            raise _ActorLost from error
        finally:
            actor.num_playing -= 1
            self._sampler.close_try(current)
        await current.give_up()  # what the episode gave up may still be on its way to the engine's ears
        trajectory, late = pickle.loads(packed)  # noqa: S301  (from a process that we started)
        return self._received(trajectory, late, setup, current, recorder)

    def _received(
        self, trajectory: Trajectory, late: RecordError | None, setup: RolloutSetup, ended: Try, recorder: Recorder
    ) -> Trajectory:
        """Bring the count to what the trajectory holds."""
        if setup.teacher is not None:  # what a teacher said is counted in the student's ids, which are made there
            recorder.count(trajectory.num_sampled_tokens)
        else:  # an answer that was lost on its way was asked for, and drawn, again
            recorder.lose(ended.num_delivered - trajectory.num_sampled_tokens)
            # What was cut off is known here alone: its actor was answered with nothing.
            unrecorded = trajectory.num_unrecorded_tokens + ended.num_cut_off
            trajectory = trajectory.replace(num_unrecorded_tokens=unrecorded)
        assert recorder.num_sampled_tokens == trajectory.num_sampled_tokens
        recorder.close()
        recorder.late = recorder.late or late
        return trajectory

    # ---- actors come and go

    async def _add(self) -> None:
        handle = self._make(self._packed, self._place)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                pid = await handle.prepare.remote()
        except BaseException as error:
            self._ray.kill(handle)
            told = self._tell(error)
            if told is None:
                raise
            raise told from error
        self._actors.append(_Actor(handle, pid))
        self._changed.set()

    def _tell(self, error: BaseException) -> UsageError | None:
        """Why an actor could not be started, for people; None where nothing is wrong with it (a cancellation)."""
        cause = getattr(error, "cause", error)  # Ray wraps what was raised in the actor
        if isinstance(cause, TimeoutError):
            free = self._ray.available_resources().get("CPU", 0.0)
            return UsageError(
                f"a Ray actor did not start within {START_TIMEOUT:.0f} s; {free:g} CPUs are free. Lower "
                "orchestrator.rollout.workers or cpus_per_worker, or add hosts"
            )
        if isinstance(cause, SamplerFault):
            return UsageError(f"a Ray actor cannot reach the sampler ({cause}); set orchestrator.rollout.host to this "
                              "machine's address as the actors' hosts know it")  # fmt: skip
        if isinstance(cause, UsageError):
            return UsageError(f"on a Ray actor: {cause}")
        if isinstance(error, self._ray.exceptions.RayError):
            return UsageError(f"a Ray actor could not start: {type(cause).__name__}: {cause}")
        return None

    def _lose(self, actor: _Actor, error: BaseException) -> None:
        """Several episodes may tell of one loss."""
        if actor not in self._actors:
            return
        self._actors.remove(actor)
        self._ray.kill(actor.handle)  # it may only be stuck
        self.num_lost += 1
        said = _short(error).partition(" Some common causes include")[0]
        self._why = said or f"it did not end an episode within {GRACE:g} s of its deadline"
        logger.warning("a Ray actor was lost; its %d episodes are played again: %s", actor.num_playing, self._why)
        for _ in range(self._workers - len(self._actors) - len(self._starting)):
            starting = asyncio.create_task(self._replace(), name="ray-actor")
            self._starting.add(starting)
            starting.add_done_callback(self._ended)

    async def _replace(self) -> None:
        try:
            await self._add()
        except UsageError as error:
            self._why = str(error)
            logger.warning("no other Ray actor could be started, %d are left: %s", len(self._actors), error)

    def _ended(self, starting: asyncio.Task[None]) -> None:
        self._starting.discard(starting)
        self._changed.set()


def _unplayed(task: EpisodeTask, recorder: Recorder, error: str) -> Trajectory:
    recorder.close()
    return Trajectory(
        example_id=task.example.id, stop_reason=StopReason.API_ERROR, truncated=True, error=error, **task.identity
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
