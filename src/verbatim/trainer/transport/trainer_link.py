"""Defines the orchestrator's link to a trainer, wherever the trainer runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, SendReport, WeightStore
from verbatim.trainer.transport.canary import Probes


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerReady:
    """The state of a trainer before its first batch."""

    version: int
    """Steps done before; also the policy version it holds."""
    weights: str
    """The folder (or hub id) of that version's weights."""
    checkpoint: Path | None
    """The checkpoint it goes on from; None at the start of a run."""
    probes: Probes | None = None
    """That version's logprobs of the fixed probes; None: this trainer has none."""
    store: WeightStore | None = None
    """Where it meets the servers that it sends weights to; None: it sends none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """The result of training on one batch: one step."""

    version: int
    """The policy version that now exists: batches trained and published."""
    weights: Path
    """Its folder, complete."""
    num_trained_tokens: int
    """Tokens that were targets of an optimizer step."""
    metrics: Mapping[str, float]
    """The trainer's metrics."""
    probes: Probes | None = None
    """The new version's logprobs of the fixed probes; None: this trainer has none."""
    state: Path | None = None
    """Where it left its part of a checkpoint, if it was asked to; the caller moves it away."""
    tokens: TrainedTokens | None = None
    """What it computed for each trained token; None: that is not kept."""


class TrainerLink(Protocol):
    """Trains batches in the order in which they are handed over, and publishes the weights of each.

    A batch may be handed over while the one before is still being trained.
    """

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Train on the batch; the policy version afterwards is `version`.

        Args:
            samples: The batch.
            version: One more than that of the batch handed over before.
            checkpoint: Also write the trainer's part of a checkpoint, before the next batch is begun.

        Raises:
            RunStopped: the loss or the gradient is not finite, the weights could not be published, or the trainer is
                gone. Batches that were handed over after this one are not trained.
        """

    async def save(self, folder: Path, version: int) -> None:
        """Write everything that continuing needs into an existing folder: weights, optimizer, schedule.

        Raises:
            RunStopped: the trainer does not hold exactly this version, or is gone.
        """

    async def send(self, order: SendOrder) -> SendReport:
        """Send the weights of the version that it holds to the sampler's servers, before it begins another batch.

        Raises:
            RunStopped: the trainer is gone, or one of its processes failed.
        """

    async def watch(self) -> None:
        """Ends only when the trainer is gone.

        Raises:
            RunStopped: it is gone, or stuck; says what was seen of it last.
        """

    async def close(self) -> None:
        """Let the trainer end, and release what it holds."""
