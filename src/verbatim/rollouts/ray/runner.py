"""Runs episodes on a Ray cluster: actors on any number of hosts, which reach the sampler over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from verbatim.errors import SamplerFault, UsageError
from verbatim.inference.base import Sampler
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.server import serve_sampler
from verbatim.renderers.base import Renderer
from verbatim.rollouts.ray.cluster import ray_running
from verbatim.rollouts.runner import EpisodeTask
from verbatim.rollouts.workers import worker
from verbatim.rollouts.workers.counting_sampler import CountingSampler
from verbatim.rollouts.workers.episodes import EpisodePlan, RemoteSetup, WorkerEpisodes, packed_plan
from verbatim.rollouts.workers.pool import WorkerPool
from verbatim.rollouts.workers.worker import CannotBeSent, WorkerLost
from verbatim.rollouts.workers.worker_context import WorkerContext
from verbatim.texts import error_text


@contextlib.asynccontextmanager
async def ray_runner(
    setups: Mapping[tuple[str, str], RemoteSetup],
    sampler: Sampler,
    renderer: Renderer,
    *,
    workers: int,
    cpus_per_worker: float = 1.0,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[WorkerPool]:
    """Context manager for an `EpisodeRunner` on Ray actors. The sampler stays here and is served to them over HTTP.

    Args:
        setups: Setups by purpose ("train", "eval") and label.
        sampler: The sampler of the episodes.
        renderer: The renderer of its model.
        workers: Number of actors.
        cpus_per_worker: CPUs of each actor.
        address: Address of the Ray cluster; None starts Ray here.
        host: This machine's address for the actors' hosts.
        port: The sampler's port; 0 takes a free one.

    Raises:
        UsageError: Ray or the actors cannot be started; says why.
    """
    counted, key, context = CountingSampler(sampler), secrets.token_urlsafe(24), WorkerContext.current()
    with ray_running(address, num_cpus=max(1, math.ceil(workers * cpus_per_worker))) as ray:
        plan = packed_plan(setups, renderer, ray.cloudpickle.dumps)
        async with serve_sampler(counted, host=host, port=port, api_key=key) as server:

            def make(alone: bool) -> RayWorker:
                # A worker for a single episode reserves no CPU, because the others hold all.
                cpus = 0.0 if alone else cpus_per_worker
                return RayWorker(ray, EpisodeActor, (context, plan, server.url, key), cpus=cpus)

            pool = WorkerPool(make, counted, workers=workers, what="Ray actor")
            try:
                await pool.start()
                yield pool
            finally:
                await pool.close()


class EpisodeActor:
    """Runs episodes concurrently on the event loop of a Ray process."""

    def __init__(self, context: WorkerContext, plan: bytes, url: str, api_key: str) -> None:
        context.apply()
        self._plan, self._url, self._api_key = plan, url, api_key
        self._open = contextlib.AsyncExitStack()
        self._episodes: WorkerEpisodes | None = None

    async def prepare(self) -> int:
        """Create everything that episodes need. Returns the id of this process.

        Raises:
            UsageError: an environment cannot be imported or created on this host.
            SamplerFault: the sampler cannot be reached from it.
        """
        from ray import cloudpickle

        plan: EpisodePlan = cloudpickle.loads(self._plan)
        sampler = await HttpSampler.connect(self._url, api_key=self._api_key)
        self._episodes = await self._open.enter_async_context(WorkerEpisodes.made(plan, sampler))
        return os.getpid()

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run an episode; returns it packed."""
        assert self._episodes is not None
        return await self._episodes.run(label, task)


class RayWorker:
    """A `Worker` that is a Ray actor.

    Args:
        ray: The connected package.
        actor: The actor's class.
        given: Arguments of its constructor.
        cpus: CPUs that it reserves.
    """

    def __init__(self, ray: Any, actor: type, given: tuple[Any, ...], *, cpus: float) -> None:
        self._ray = ray
        # Ray limits an actor's concurrent calls; orchestrator.max_concurrent limits them already.
        options = {"num_cpus": cpus, "scheduling_strategy": "SPREAD", "max_concurrency": 100_000}
        self._make: Callable[[], Any] = lambda: ray.remote(actor).options(**options).remote(*given)
        self.handle: Any = None
        """Ray's handle, once it is started."""
        errors = ray.exceptions
        # A task that Ray cancelled was in a process that is ending.
        self._signs_of_loss = (
            errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError, errors.TaskCancelledError
        )  # fmt: skip

    async def start(self) -> int:
        """Place it on a host and create its environments. Returns its process id there.

        Raises:
            UsageError: it could not be placed or created.
        """
        self.handle = self._make()
        try:
            async with asyncio.timeout(worker.START_TIMEOUT):
                pid: int = await self.handle.prepare.remote()
        except BaseException as error:
            self.kill()
            usage_error = self._start_error(error)
            if usage_error is None:
                raise
            raise usage_error from error
        return pid

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run one episode.

        Raises:
            WorkerLost: the actor or its host is lost.
            CannotBeSent: the example cannot be pickled.
        """
        try:
            answer = self.handle.run.remote(label, task)
        except Exception as error:  # pickling an example raises anything
            raise CannotBeSent(error_text(error, 500)) from error
        try:
            packed: bytes = await answer
        except asyncio.CancelledError:
            self._ray.cancel(answer)
            raise
        except self._signs_of_loss as error:
            said = " ".join(str(error).split())[:500].partition(" Some common causes include")[0]
            raise WorkerLost(said or type(error).__name__) from error
        return packed

    def kill(self) -> None:
        """Kill the actor, if it was started."""
        if self.handle is not None:
            self._ray.kill(self.handle)

    async def close(self) -> None:
        """Kill the actor; Ray releases its resources."""
        self.kill()

    def _start_error(self, error: BaseException) -> UsageError | None:
        """Why an actor could not be started; None for other errors, such as a cancellation."""
        cause = getattr(error, "cause", error)  # Ray wraps exceptions of the actor
        if isinstance(cause, TimeoutError):
            free = self._ray.available_resources().get("CPU", 0.0)
            return UsageError(
                f"a Ray actor did not start within {worker.START_TIMEOUT:.0f} s; {free:g} CPUs are free. Lower "
                "orchestrator.rollout.workers or orchestrator.rollout.ray.cpus_per_worker, or add hosts"
            )
        if isinstance(cause, SamplerFault):
            return UsageError(f"a Ray actor cannot reach the sampler ({cause}); set orchestrator.rollout.ray.host to "
                              "this machine's address as the actors' hosts know it")  # fmt: skip
        if isinstance(cause, UsageError):
            return UsageError(f"on a Ray actor: {cause}")
        if isinstance(error, self._ray.exceptions.RayError):
            return UsageError(f"a Ray actor could not start: {type(cause).__name__}: {cause}")
        return None
