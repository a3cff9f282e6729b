"""Runs the trainer on a thread of the orchestrator's process: for debugging, where a breakpoint works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from verbatim.trainer.worker import TrainerWorker
from verbatim.transport import StepReport
from verbatim.types import TrainingSample


class LocalTrainer:
    """A `transport.TrainerLink` to a trainer in this process. The event loop stays free while it computes.

    Args:
        worker: Does the work.
        num_threads: Threads of its matrix products; None takes torch's setting.
    """

    def __init__(self, worker: TrainerWorker, *, num_threads: int | None = None) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="trainer", initializer=lambda: set_num_threads(num_threads)
        )

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Train on one batch and publish the weights."""
        train = partial(self._worker.train, samples, version, checkpoint=checkpoint)
        return await asyncio.get_running_loop().run_in_executor(self._thread, train)

    async def save(self, folder: Path, version: int) -> None:
        """Write weights, optimizer and schedule."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.save, folder, version)

    async def watch(self) -> None:
        """A thread of this process cannot be gone: returns never."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)


def set_num_threads(num_threads: int | None) -> None:
    """Set the threads of matrix products in the calling thread; None leaves torch's setting."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
