"""The trainer as the orchestrator sees it, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verbatim.types import TrainingSample


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a batch became."""

    version: int
    """The policy version that now exists: batches trained and published."""
    weights: Path
    """Its folder, complete."""
    num_trained_tokens: int
    """Tokens that were targets of an optimizer step."""
    metrics: Mapping[str, float]
    """The trainer's metrics."""


class TrainerLink(Protocol):
    """Trains batches one after the other, and publishes the weights of each."""

    async def train(self, samples: Sequence[TrainingSample], version: int) -> StepReport:
        """Train on the batch; the policy version afterwards is `version`.

        Raises:
            RunStopped: the loss or the gradient is not finite. Weights are then those of the last good optimizer step.
        """

    async def save(self, folder: Path) -> None:
        """Write everything that continuing needs: weights (a Hugging Face folder), optimizer, schedule."""

    async def close(self) -> None:
        """Release what it holds."""
