"""Runs episodes in child processes of this machine; each process serves one environment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from verbatim.inference.base import Sampler
from verbatim.renderers.base import Renderer
from verbatim.rollouts.group import run_together
from verbatim.rollouts.processes.worker import ProcessPlan, ProcessWorker
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeRunner, EpisodeTask, LocalRunner, RolloutSetup
from verbatim.rollouts.workers.counting_sampler import CountingSampler
from verbatim.rollouts.workers.episodes import RemoteSetup, packed_plan
from verbatim.rollouts.workers.pool import WorkerPool
from verbatim.rollouts.workers.worker_context import WorkerContext
from verbatim.types import Trajectory


@contextlib.asynccontextmanager
async def process_runner(
    setups: Mapping[tuple[str, str], RemoteSetup],
    sampler: Sampler,
    renderer: Renderer,
    *,
    workers: int,
    memory_mb: int | None = None,
    logs: Path | None = None,
) -> AsyncIterator[ProcessRunner]:
    """Context manager for an `EpisodeRunner` on worker processes. The sampler stays in this process.

    Args:
        setups: Setups by purpose ("train", "eval") and label. Episodes of other environments run in this process.
        sampler: The sampler of the episodes.
        renderer: The renderer of its model.
        workers: Processes of each environment.
        memory_mb: Most memory of one process in MB (2**20 bytes); None = no limit.
        logs: Folder for the output of environments, `{label}.log`; None deletes it at the end of the block.

    Raises:
        UsageError: an environment's processes cannot be started; names it and says why.
    """
    counted, context = CountingSampler(sampler), WorkerContext.current()
    by_label: dict[str, dict[tuple[str, str], RemoteSetup]] = {}
    for (purpose, label), setup in setups.items():
        by_label.setdefault(label, {})[purpose, label] = setup
    with contextlib.ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-")))
        folder.mkdir(parents=True, exist_ok=True)
        pools: dict[str, WorkerPool] = {}
        for (label, own), name in zip(by_label.items(), log_names(list(by_label)), strict=True):
            plan = ProcessPlan(
                label=label, plan=packed_plan(own, renderer, pickle.dumps), context=context, log=folder / name,
                memory_mb=memory_mb,
            )  # fmt: skip
            pools[label] = WorkerPool(
                functools.partial(_worker, plan, counted), counted, workers=workers,
                what=f"worker process of environment {label!r}",
            )  # fmt: skip
        try:
            await run_together(pool.start() for pool in pools.values())
            yield ProcessRunner({key: pools[key[1]] for key in setups})
        finally:
            await asyncio.gather(*(pool.close() for pool in pools.values()))


def _worker(plan: ProcessPlan, sampler: CountingSampler, alone: bool) -> ProcessWorker:
    """Create a worker; one for a single episode does not differ."""
    return ProcessWorker(plan, sampler)


def log_names(labels: list[str]) -> list[str]:
    """A file name for each environment.

    >>> log_names(["guess_number", "my env/2", "my env 2"])
    ['guess_number.log', 'my_env_2.log', 'my_env_2-2.log']
    """
    taken: Counter[str] = Counter()
    names = []
    for label in labels:
        plain = re.sub(r"[^\w-]+", "_", label)[:80]
        taken[plain] += 1
        names.append(f"{plain}.log" if taken[plain] == 1 else f"{plain}-{taken[plain]}.log")
    return names


class ProcessRunner:
    """An `EpisodeRunner` that sends each episode to the workers of its environment; where it has none, it runs here.

    Args:
        pools: By purpose and label.
    """

    def __init__(self, pools: Mapping[tuple[str, str], WorkerPool]) -> None:
        self.pools = pools
        """By purpose and label."""
        self._here = LocalRunner()

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """The finished episode.

        Raises:
            RunStopped: the environment has no worker left, and no other can be started.
        """
        runner: EpisodeRunner = self.pools.get((task.purpose, setup.env), self._here)
        return await runner.run(setup, task, recorder)

    def metrics(self) -> Mapping[str, float]:
        """Sums over all environments, and the number of lost workers of each."""
        total: Counter[str] = Counter()
        lost: dict[str, float] = {}
        by_label = {label: pool for (_, label), pool in self.pools.items()}
        for label, pool in by_label.items():
            for name, value in pool.metrics().items():
                total[name] += value  # type: ignore[assignment]
            lost[f"rollout/workers_lost/{label}"] = pool.num_lost
        return {**total, **lost}
