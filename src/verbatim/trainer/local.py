"""The trainer in the orchestrator's own process, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verbatim.trainer.trainer import Trainer
from verbatim.transport import StepReport, WeightFolders
from verbatim.types import TrainingSample


class LocalTrainer:
    """A `transport.TrainerLink` to a trainer in this process. The event loop stays free while it computes."""

    def __init__(self, trainer: Trainer, weights: WeightFolders) -> None:
        self._trainer = trainer
        self._weights = weights
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def train(self, samples: Sequence[TrainingSample], version: int) -> StepReport:
        """Train on one batch and publish the weights."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._train, samples, version)

    def _train(self, samples: Sequence[TrainingSample], version: int) -> StepReport:
        metrics = self._trainer.train_batch(samples)
        folder = self._weights.publish(version, self._trainer.save_weights)
        return StepReport(
            version=version, weights=folder, num_trained_tokens=int(metrics["trained_tokens"]), metrics=metrics
        )

    async def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._save, folder)

    def _save(self, folder: Path) -> None:
        self._trainer.save_weights(folder / "weights")
        self._trainer.save_state(folder / "trainer")

    async def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
