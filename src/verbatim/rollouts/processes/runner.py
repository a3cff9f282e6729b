"""Runs episodes in child processes on this machine. Each process serves one environment."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from verbatim.config import BackendSettings
from verbatim.config.sections import PositiveInt
from verbatim.core.tasks import run_together
from verbatim.core.texts import numbered
from verbatim.core.types import Trajectory
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.draws import CountingSampler
from verbatim.rollouts.processes.worker import ProcessWorker
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeRunner, EpisodeTask, LocalRunner, RolloutSetup
from verbatim.rollouts.workers.episodes import RemoteSetup, packed_plan
from verbatim.rollouts.workers.pool import WorkerPool
from verbatim.rollouts.workers.worker import WorkerContext


class ProcessSettings(BackendSettings):
    """[orchestrator.rollout.processes]: runs episodes in child processes of this machine. The settings also apply to
    environments with `isolated`."""

    worker_memory_mb: PositiveInt | None = None
    """Maximum memory of one process in MiB (2**20 bytes). A process that uses more is replaced, and its episodes run
    again. By default there is no limit."""


@contextlib.asynccontextmanager
async def process_runner(
    inputs: RunnerInputs,
    settings: ProcessSettings = ProcessSettings(),  # noqa: B008  frozen
) -> AsyncIterator[ProcessRunner]:
    """Context manager for an `EpisodeRunner` that uses worker processes: `inputs.workers` processes for each
    environment. The sampler stays in this process, and so do the episodes of environments that are not in
    `inputs.setups`. What an environment prints is written to `{label}.log`. Raises UsageError if the processes of an
    environment cannot be started; the message names the environment and says why."""
    counted, context = CountingSampler(inputs.sampler), WorkerContext.current()
    by_label: dict[str, dict[tuple[str, str], RemoteSetup]] = {}
    for (purpose, label), setup in inputs.setups.items():
        by_label.setdefault(label, {})[purpose, label] = setup

    def pool(label: str, log: Path) -> WorkerPool:
        plan = packed_plan(by_label[label], inputs.renderer, pickle.dumps)

        def make(alone: bool) -> ProcessWorker:  # a worker for a single episode is like any other
            return ProcessWorker(label, plan, counted, context=context, log=log, memory_mb=settings.worker_memory_mb)

        what = f"worker process of environment {label!r}"
        return WorkerPool(make, counted, workers=inputs.workers, what=what)

    with contextlib.ExitStack() as stack:
        folder = inputs.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-")))
        folder.mkdir(parents=True, exist_ok=True)
        logs = zip(by_label, log_names(list(by_label)), strict=True)
        pools = {label: pool(label, folder / name) for label, name in logs}
        try:
            await run_together(pool.start() for pool in pools.values())
            yield ProcessRunner({key: pools[key[1]] for key in inputs.setups})
        finally:
            await asyncio.gather(*(pool.close() for pool in pools.values()))


def log_names(labels: list[str]) -> list[str]:
    """Return a unique file name for the log of each environment.

    >>> log_names(["guess_number", "my env", "my/env", "my_env_2"])
    ['guess_number.log', 'my_env.log', 'my_env_2.log', 'my_env_2_2.log']
    """
    names: list[str] = []
    for label in labels:
        names.append(numbered(re.sub(r"[^\w-]+", "_", label)[:80], names))
    return [f"{name}.log" for name in names]


class ProcessRunner:
    """An `EpisodeRunner` that sends each episode to the workers of its environment, or runs the episode in this process
    if the environment has none."""

    def __init__(self, pools: Mapping[tuple[str, str], WorkerPool]) -> None:
        self.pools = pools
        """Worker pools, keyed by purpose and label."""
        self._here = LocalRunner()

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """Run one episode. Raises RunStopped as `WorkerPool.run` does."""
        runner: EpisodeRunner = self.pools.get((task.purpose, setup.env), self._here)
        return await runner.run(setup, task, recorder)

    def metrics(self) -> Mapping[str, float]:
        """Return sums over all environments, and the number of lost workers for each environment."""
        total: Counter[str] = Counter()
        lost: dict[str, float] = {}
        for label, pool in {label: pool for (_, label), pool in self.pools.items()}.items():
            total.update(pool.metrics())
            lost[f"rollout/workers_lost/{label}"] = pool.num_lost
        return {**total, **lost}
