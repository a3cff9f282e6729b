"""Collects the trainer's logprob and gradient of each trained token in a batch, in any order of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import TrainingSample
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.parallel.ranks import Ranks


class TokenValues:
    """Logprobs and gradients of one process's targets. They stay on the device until `read`.

    Args:
        lengths: The number of tokens in all samples of each trajectory, by trajectory id.
    """

    def __init__(self, lengths: dict[str, int]) -> None:
        starts = np.cumsum([0, *lengths.values()])
        self._starts = dict(zip(lengths, starts.tolist(), strict=False))
        self._size = int(starts[-1])
        self._logprobs: list[tuple[np.ndarray, Tensor]] = []
        self._gradients: list[tuple[np.ndarray, Tensor]] = []

    def add_logprobs(self, batch: DeviceBatch, at: slice, logprobs_M: Tensor) -> None:
        """Add the trainer's logprobs of the targets `at`."""
        self._logprobs.append((self._places(batch, at), logprobs_M.detach()))

    def add_gradient(self, batch: DeviceBatch, at: slice, grad_M: Tensor) -> None:
        """Add dL/dlogprob of the targets `at`."""
        self._gradients.append((self._places(batch, at), grad_M.detach()))

    def read(self, samples: Sequence[TrainingSample], ranks: Ranks | None) -> list[TrainedTokens]:
        """The values of each sample's trained tokens, gathered from all ranks. Ranks other than 0 get an empty list.

        Args:
            samples: The samples whose `lengths_of` was given to the constructor; unused on ranks other than 0.
            ranks: The processes of the trainer, all of which call this; None for one process.
        """
        logprobs, gradients = _dense(self._logprobs, self._size), _dense(self._gradients, self._size)
        self._logprobs.clear()
        self._gradients.clear()
        if ranks is not None:
            for dense in (logprobs, gradients):  # a token's value is on one rank only; the other ranks have 0
                ranks.total(dense)
            if not ranks.leads:
                return []
        found, next_start = [], dict(self._starts)
        for sample in samples:
            start = next_start[sample.trajectory_id]
            next_start[sample.trajectory_id] = start + len(sample)
            places = start + np.flatnonzero(sample.loss_mask)
            found.append(TrainedTokens(logprobs=logprobs.numpy()[places], gradients=gradients.numpy()[places]))
        return found

    def _places(self, batch: DeviceBatch, at: slice) -> np.ndarray:
        targets = batch.host.targets
        starts = np.array([self._starts[name] for name in batch.host.trajectory_ids], dtype=np.int64)
        places: np.ndarray = starts[targets.trajectories[at]] + targets.offsets[at]
        return places


def lengths_of(samples: Sequence[TrainingSample]) -> dict[str, int]:
    """The number of tokens in all samples of each trajectory, by trajectory id."""
    lengths: dict[str, int] = {}
    for sample in samples:
        lengths[sample.trajectory_id] = lengths.get(sample.trajectory_id, 0) + len(sample)
    return lengths


def in_order(
    samples: Sequence[TrainingSample],
    parts: Sequence[Sequence[TrainingSample]],
    tokens: Sequence[Sequence[TrainedTokens]],
) -> TrainedTokens:
    """The values of a batch's trained tokens in batch order, joined from the values of its optimizer steps.

    Args:
        samples: The batch.
        parts: The samples of each optimizer step; a sample without a trained token may be in none of them.
        tokens: The values of each of these samples, by optimizer step.
    """
    of_sample = {
        id(sample): found
        for part, kept in zip(parts, tokens, strict=True)
        for sample, found in zip(part, kept, strict=True)
    }
    return TrainedTokens.joined([of_sample[id(sample)] for sample in samples if id(sample) in of_sample])


def _dense(found: Sequence[tuple[np.ndarray, Tensor]], size: int) -> Tensor:
    """Scatter values to their places and put 0 everywhere else: float32 [size], in host memory."""
    dense = torch.zeros(size, dtype=torch.float32, device="cpu")
    for places, values in found:
        dense.numpy()[places] = values.float().cpu().numpy()
    return dense
