"""Lists the rollout backends by name: the processes in which episodes run, each with its own settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.config import BackendSettings
from verbatim.inference.sampler import Sampler
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.runner import EpisodeRunner, LocalRunner
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


def local_backend(
    inputs: RunnerInputs, settings: BackendSettings
) -> contextlib.AbstractAsyncContextManager[EpisodeRunner]:
    """Episodes run in this process."""
    return contextlib.nullcontext(LocalRunner())


RUNNERS: Mapping[str, str | Callable[[RunnerInputs, Any], contextlib.AbstractAsyncContextManager[EpisodeRunner]]] = {
    "local": local_backend,
    "processes": "verbatim.rollouts.processes.runner:process_runner",
    "ray": "verbatim.rollouts.ray.runner:ray_runner",
}
"""`backend(inputs: RunnerInputs, settings)` by name, or where each lives: an asynchronous context manager that gives an
`EpisodeRunner`. The annotation of `settings`, a subclass of `BackendSettings`, has the keys of
[orchestrator.rollout.NAME]. Importing a backend's module loads nothing heavy."""
