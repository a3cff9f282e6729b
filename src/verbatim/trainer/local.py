"""Runs the trainer on a thread of the orchestrator's process: for debugging, because breakpoints work there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, SendReport
from verbatim.trainer.transport import StepReport
from verbatim.trainer.worker import TrainerWorker


class LocalTrainer:
    """A `transport.TrainerLink` to a trainer in this process. The event loop stays responsive while the trainer
    computes."""

    def __init__(self, worker: TrainerWorker, *, num_threads: int | None = None) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="trainer", initializer=lambda: set_num_threads(num_threads)
        )

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        train = partial(self._worker.train, samples, version, checkpoint=checkpoint)
        return await asyncio.get_running_loop().run_in_executor(self._thread, train)

    async def save(self, folder: Path, version: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.save, folder, version)

    async def send(self, order: SendOrder) -> SendReport:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.send, order)

    async def watch(self) -> None:
        """Never returns: a thread of this process cannot be lost on its own."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._thread.shutdown(wait=True)


def set_num_threads(num_threads: int | None) -> None:
    """Set torch's intra-op threads for the calling thread; None keeps torch's setting."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
