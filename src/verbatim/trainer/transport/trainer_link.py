"""Defines `TrainerLink`, the orchestrator's interface to a trainer, whether local or in another process."""

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
    """The policy version that the trainer holds, which is the number of steps completed so far."""
    weights: str
    """The folder (or hub id) of that version's weights."""
    checkpoint: Path | None
    """The checkpoint that the trainer resumes from; None for a new run."""
    probes: Probes | None = None
    """The logprobs of the fixed probes under `version`; None if this trainer does not compute probes."""
    store: WeightStore | None = None
    """Rendezvous store through which trainer and servers broadcast weights; None if weights are published as
    folders."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """The result of training on one batch: one step."""

    version: int
    """The new policy version: the number of batches trained and published."""
    weights: Path
    """The complete folder of the new version's weights."""
    num_trained_tokens: int
    """Number of tokens that were targets of an optimizer step."""
    metrics: Mapping[str, float]
    """The metrics of `Trainer.train_batch` and of publishing."""
    probes: Probes | None = None
    """The logprobs of the fixed probes under the new version; None if this trainer does not compute probes."""
    state: Path | None = None
    """The folder with the trainer's part of a checkpoint, if a checkpoint was requested. The caller moves the folder
    away."""
    tokens: TrainedTokens | None = None
    """The trainer's logprob and gradient of each trained token; None if they are not kept."""


class TrainerLink(Protocol):
    """Trains on batches in the order in which they are handed over, and publishes weights after each batch.

    A batch may be handed over while the previous batch is still being trained.
    """

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Train on the batch; the policy version afterwards is `version`.

        Args:
            samples: The batch.
            version: One more than the version of the previous batch.
            checkpoint: Also write the trainer's part of a checkpoint, before the next batch starts.

        Raises:
            RunStopped: the loss or the gradient is not finite, the weights could not be published, or the trainer is
                gone. Batches handed over after this one are not trained.
        """

    async def save(self, folder: Path, version: int) -> None:
        """Write everything that a resume needs into an existing folder: weights, optimizer, schedule.

        Raises:
            RunStopped: the trainer does not hold exactly this version, or is gone.
        """

    async def send(self, order: SendOrder) -> SendReport:
        """Send the current version's weights to the sampler's servers, before the next batch starts.

        Raises:
            RunStopped: the trainer is gone, or one of its processes failed.
        """

    async def watch(self) -> None:
        """Watch the trainer; never returns normally.

        Raises:
            RunStopped: the trainer is gone or stuck; the message gives the trainer's last known activity.
        """

    async def close(self) -> None:
        """Tell the trainer to end, and release everything that this link holds."""
