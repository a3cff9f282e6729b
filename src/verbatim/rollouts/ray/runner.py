"""Runs episodes on a Ray cluster, in actors on any number of hosts that reach the sampler over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

from verbatim.config import BackendSettings
from verbatim.config.cluster import ClusterConfig
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.imports import refuse_without
from verbatim.core.texts import error_text
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.server import serve_sampler
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.draws import CountingSampler
from verbatim.rollouts.ray.cluster import ray_running, said_by_ray
from verbatim.rollouts.runner import EpisodeTask
from verbatim.rollouts.workers import worker
from verbatim.rollouts.workers.episodes import RunEpisode, open_episodes, packed_plan
from verbatim.rollouts.workers.pool import WorkerPool
from verbatim.rollouts.workers.worker import CannotBeSent, WorkerContext, WorkerLost


class RaySettings(BackendSettings):
    """See [cluster]."""

    def check(self) -> None:
        """Check that Ray is installed."""
        refuse_without("ray", extra="ray", what='orchestrator.rollout.backend = "ray"')


@contextlib.asynccontextmanager
async def ray_runner(
    inputs: RunnerInputs,
    settings: RaySettings = RaySettings(),  # noqa: B008  frozen
) -> AsyncIterator[WorkerPool]:
    """Context manager for an `EpisodeRunner` on Ray actors. The sampler stays in this process, and the actors reach it
    over HTTP. Raises UsageError if Ray or the actors cannot be started; the message says why."""
    counted, key, context = CountingSampler(inputs.sampler), secrets.token_urlsafe(24), WorkerContext.current()
    cluster = inputs.cluster or ClusterConfig(address="local", host="127.0.0.1")
    cpus, gpus = cluster.worker.cpus, cluster.worker.gpus or 0.0
    address = None if cluster.address == "local" else cluster.address
    with ray_running(address, num_cpus=max(1, math.ceil(inputs.workers * cpus))) as ray:
        plan = packed_plan(inputs.setups, inputs.renderer, ray.cloudpickle.dumps)
        host = cluster.host or ray.util.get_node_ip_address()
        async with serve_sampler(counted, host=host, port=cluster.port, api_key=key) as server:

            def make(alone: bool) -> RayWorker:
                # A worker for a single episode reserves nothing, because the other workers hold all of it.
                resources = (0.0, 0.0) if alone else (cpus, gpus)
                return RayWorker(ray, *resources, context, plan, server.url, key)

            pool = WorkerPool(make, counted, workers=inputs.workers, what="Ray actor")
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
        self._run: RunEpisode | None = None

    async def prepare(self) -> int:
        """Create everything that episodes need, and return the id of this process. Raises SamplerFault if the sampler
        cannot be reached from this host."""
        sampler = await HttpSampler.connect(self._url, api_key=self._api_key)
        self._run = await self._open.enter_async_context(open_episodes(self._plan, sampler))
        return os.getpid()

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run an episode, and return the packed trajectory."""
        assert self._run is not None
        return await self._run(label, task)


class RayWorker:
    """A `Worker` whose episodes run in an `EpisodeActor`. The actor is created with the arguments `given`, and reserves
    these CPUs and GPUs."""

    def __init__(self, ray: Any, cpus: float, gpus: float, *given: Any) -> None:
        self._ray, self._given = ray, given
        # Effectively unlimited: Ray's default limits an actor's concurrent calls, but `max_concurrent` of the
        # orchestrator already limits the episodes.
        self._options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": "SPREAD",
            "max_concurrency": 100_000,
        }
        self.handle: Any = None
        """Ray's handle of the actor; None until the actor is started."""
        errors = ray.exceptions
        # TaskCancelledError: we did not cancel the task, so Ray did, because the actor's process is ending.
        self._signs_of_loss = (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.WorkerCrashedError,
            errors.TaskCancelledError,
        )

    async def start(self) -> int:
        """Start the actor on a host, and create its environments. Return the actor's process id on that host."""
        self.handle = self._ray.remote(EpisodeActor).options(**self._options).remote(*self._given)
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
        """Run one episode, and return the packed trajectory."""
        try:
            answer = self.handle.run.remote(label, task)
        except Exception as error:  # pickling an example may raise anything
            raise CannotBeSent(error_text(error, 500)) from error
        try:
            packed: bytes = await answer
        except asyncio.CancelledError:
            self._ray.cancel(answer)
            raise
        except self._signs_of_loss as error:
            raise WorkerLost(said_by_ray(error)) from error
        return packed

    def kill(self) -> None:
        """Kill the actor if it was started."""
        if self.handle is not None:
            self._ray.kill(self.handle)

    async def close(self) -> None:
        """Kill the actor; Ray then releases its resources."""
        self.kill()

    def _start_error(self, error: BaseException) -> UsageError | None:
        """Return the error that says why an actor could not be started; None for other errors, such as a
        cancellation."""
        cause = getattr(error, "cause", error)  # Ray wraps exceptions of the actor
        if isinstance(cause, TimeoutError):
            free = self._ray.available_resources().get("CPU", 0.0)
            return UsageError(
                f"a Ray actor did not start within {worker.START_TIMEOUT:.0f} s; {free:g} CPUs are free. Lower "
                "orchestrator.rollout.workers or cluster.worker.cpus, or add nodes"
            )
        if isinstance(cause, SamplerFault):
            return UsageError(
                f"a Ray actor cannot reach the sampler ({cause}); set cluster.host to "
                "this machine's address as seen from the actors' hosts"
            )
        if isinstance(cause, UsageError):
            return UsageError(f"on a Ray actor: {cause}")
        if isinstance(error, self._ray.exceptions.RayError):
            return UsageError(f"a Ray actor could not start: {type(cause).__name__}: {said_by_ray(cause)}")
        return None
