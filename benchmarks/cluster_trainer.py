"""Defines a simulated trainer, which takes a fixed time for a step and trains one batch after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cluster_clock import running
from cluster_world import World
from verbatim.core.types import TrainingSample
from verbatim.trainer.transport import StepReport


class SimulatedTrainer:
    """A trainer that takes a fixed time for each batch, one batch after the other.

    Args:
        world: The state that the simulated parts share.
        seconds: Duration of a training step in virtual seconds.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds, self._turn = world, seconds, asyncio.Lock()

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        async with self._turn:
            await running().sleep(self._seconds)
        return StepReport(
            version=version,
            weights=Path("weights"),
            metrics={"loss": 0.0},
            probes=self._world.published(version),
            num_trained_tokens=sum(sample.num_trained_tokens for sample in samples),
        )

    async def save(self, folder: Path, version: int) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass
