"""The rollout backends, by name. A backend decides in which processes episodes run, and has settings of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.config import BackendSettings
from verbatim.config.cluster import ClusterConfig
from verbatim.inference.sampler import Sampler
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.runner import EpisodeRunner, LocalRunner
from verbatim.rollouts.workers.episodes import RemoteSetup


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnerInputs:
    """What a rollout backend gets in addition to its own settings."""

    setups: Mapping[tuple[str, str], RemoteSetup]
    """The environments whose episodes run in other processes, keyed by purpose ("train" or "eval") and label."""
    sampler: Sampler
    """Samples the tokens of every episode."""
    renderer: Renderer
    """Renderer of the sampler's model."""
    workers: int
    """Number of workers: `orchestrator.rollout.workers`."""
    logs: Path | None = None
    """Folder for the output that environments print; None to discard it."""
    cluster: ClusterConfig | None = None
    """The table [cluster], for workers on its nodes; None if the run has no cluster."""


def local_backend(
    inputs: RunnerInputs, settings: BackendSettings
) -> contextlib.AbstractAsyncContextManager[EpisodeRunner]:
    """Backend that runs the episodes in this process."""
    return contextlib.nullcontext(LocalRunner())


RUNNERS: Mapping[str, str | Callable[[RunnerInputs, Any], contextlib.AbstractAsyncContextManager[EpisodeRunner]]] = {
    "local": local_backend,
    "processes": "verbatim.rollouts.processes.runner:process_runner",
    "ray": "verbatim.rollouts.ray.runner:ray_runner",
}
"""Functions `backend(inputs: RunnerInputs, settings)` by name, or the import paths of such functions. Each returns an
async context manager whose value is an `EpisodeRunner`. The annotation of `settings`, a subclass of `BackendSettings`,
defines the keys of [orchestrator.rollout.NAME]. The module of a backend must be cheap to import, because configurations
import it."""
