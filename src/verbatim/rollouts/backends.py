"""Lists the rollout backends by name: the processes in which episodes run, each with its own settings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from verbatim.config import BackendSettings
from verbatim.config.sections import NonNegativeFloat, PositiveInt
from verbatim.errors import UsageError
from verbatim.imports import is_installed
from verbatim.inference.base import Sampler
from verbatim.renderers.base import Renderer
from verbatim.rollouts.runner import EpisodeRunner, LocalRunner

if TYPE_CHECKING:
    from verbatim.rollouts.workers.episodes import RemoteSetup


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnerInputs:
    """What a run gives to its rollout backend, beside the backend's own settings."""

    setups: Mapping[tuple[str, str], RemoteSetup]
    """By purpose ("train", "eval") and label: the environments whose episodes run elsewhere."""
    sampler: Sampler
    """Samples the tokens of every episode."""
    renderer: Renderer
    """Chat format of the sampler's model."""
    workers: int
    """orchestrator.rollout.workers."""
    logs: Path | None = None
    """The folder for what environments print; None keeps nothing of it."""


class ProcessSettings(BackendSettings):
    """[orchestrator.rollout.processes]: child processes of this machine, also for environments with `isolated`."""

    worker_memory_mb: PositiveInt | None = None
    """Most memory of one process, in MB (2**20 bytes): one that takes more is replaced, and its episodes run
    again. Any by default."""


class RaySettings(BackendSettings):
    """[orchestrator.rollout.ray]: Ray actors, on any number of hosts."""

    cpus_per_worker: NonNegativeFloat = 1.0
    """CPUs that an actor reserves on its host."""
    address: str | None = None
    """The cluster: "auto" for the one that this machine belongs to, or "10.0.0.1:6379"; by default one is started here,
    and stopped at the end."""
    host: str = "127.0.0.1"
    """This machine's address, as the actors' hosts know it: the sampler is served there."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The sampler's port; 0 takes a free one."""

    def check(self) -> None:
        """Refuse a machine without Ray."""
        if not is_installed("ray"):
            raise UsageError('orchestrator.rollout.backend = "ray" needs the package ray: pip install '
                             "'verbatim-rl[ray]'")  # fmt: skip


@contextlib.asynccontextmanager
async def local_backend(inputs: RunnerInputs, settings: BackendSettings) -> AsyncIterator[EpisodeRunner]:
    """Episodes run in this process."""
    yield LocalRunner()


@contextlib.asynccontextmanager
async def process_backend(inputs: RunnerInputs, settings: ProcessSettings) -> AsyncIterator[EpisodeRunner]:
    """Episodes run in child processes of this machine."""
    from verbatim.rollouts.processes.runner import process_runner

    async with process_runner(
        inputs.setups, inputs.sampler, inputs.renderer, workers=inputs.workers,
        memory_mb=settings.worker_memory_mb, logs=inputs.logs,
    ) as runner:  # fmt: skip
        yield runner


@contextlib.asynccontextmanager
async def ray_backend(inputs: RunnerInputs, settings: RaySettings) -> AsyncIterator[EpisodeRunner]:
    """Episodes run on Ray actors."""
    from verbatim.rollouts.ray.runner import ray_runner

    async with ray_runner(
        inputs.setups, inputs.sampler, inputs.renderer, workers=inputs.workers,
        cpus_per_worker=settings.cpus_per_worker, address=settings.address, host=settings.host, port=settings.port,
    ) as runner:  # fmt: skip
        yield runner


RUNNERS: Mapping[str, str | Callable[[RunnerInputs, Any], contextlib.AbstractAsyncContextManager[EpisodeRunner]]] = {
    "local": local_backend,
    "processes": process_backend,
    "ray": ray_backend,
}
"""`backend(inputs: RunnerInputs, settings)` by name: an asynchronous context manager that gives an `EpisodeRunner`. The
annotation of `settings`, a subclass of `BackendSettings`, has the keys of [orchestrator.rollout.NAME]."""
