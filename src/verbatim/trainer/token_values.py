"""Collects what the trainer computes for each trained token of a batch, in whatever order it comes."""

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
    """Values of one process's targets. They stay on its device until `read`.

    Args:
        lengths: Tokens of each trajectory's samples, one after the other, by trajectory id.
    """

    def __init__(self, lengths: dict[str, int]) -> None:
        starts = np.cumsum([0, *lengths.values()])
        self._starts = dict(zip(lengths, starts.tolist(), strict=False))
        self._size = int(starts[-1])
        self._logprobs: list[tuple[np.ndarray, Tensor]] = []
        self._gradients: list[tuple[np.ndarray, Tensor]] = []

    def add_logprobs(self, batch: DeviceBatch, at: slice, logprobs_M: Tensor) -> None:
        """The trainer's logprobs of some targets."""
        self._logprobs.append((self._places(batch, at), logprobs_M.detach()))

    def add_gradient(self, batch: DeviceBatch, at: slice, grad_M: Tensor) -> None:
        """The derivative of the loss by the logprobs of some targets."""
        self._gradients.append((self._places(batch, at), grad_M.detach()))

    def read(self, samples: Sequence[TrainingSample], ranks: Ranks | None) -> list[TrainedTokens]:
        """The values of each sample's trained tokens, the targets of all ranks; nothing on other ranks than 0.

        Args:
            samples: Those that it was made for; unused on other ranks than 0.
            ranks: They call this together.
        """
        logprobs, gradients = _dense(self._logprobs, self._size), _dense(self._gradients, self._size)
        self._logprobs.clear()
        self._gradients.clear()
        if ranks is not None:
            for dense in (logprobs, gradients):  # each token has a value on one rank, and 0 on the others
                ranks.total(dense)
            if not ranks.leads:
                return []
        found, ahead = [], dict(self._starts)
        for sample in samples:
            start = ahead[sample.trajectory_id]
            ahead[sample.trajectory_id] = start + len(sample)
            places = start + np.flatnonzero(sample.loss_mask)
            found.append(TrainedTokens(logprobs=logprobs.numpy()[places], gradients=gradients.numpy()[places]))
        return found

    def _places(self, batch: DeviceBatch, at: slice) -> np.ndarray:
        targets = batch.host.targets
        starts = np.array([self._starts[name] for name in batch.host.trajectory_ids], dtype=np.int64)
        places: np.ndarray = starts[targets.trajectories[at]] + targets.offsets[at]
        return places


def lengths_of(samples: Sequence[TrainingSample]) -> dict[str, int]:
    """Tokens of each trajectory's samples, by trajectory id."""
    lengths: dict[str, int] = {}
    for sample in samples:
        lengths[sample.trajectory_id] = lengths.get(sample.trajectory_id, 0) + len(sample)
    return lengths


def in_order(
    samples: Sequence[TrainingSample],
    parts: Sequence[Sequence[TrainingSample]],
    tokens: Sequence[Sequence[TrainedTokens]],
) -> TrainedTokens:
    """The tokens of a batch, in its order, from those of its optimizer steps.

    Args:
        samples: The batch.
        parts: The samples of each optimizer step; samples of which nothing is trained may be in none.
        tokens: The same shape: what was kept of each sample.
    """
    of_sample = {
        id(sample): found
        for part, kept in zip(parts, tokens, strict=True)
        for sample, found in zip(part, kept, strict=True)
    }
    return TrainedTokens.joined([of_sample[id(sample)] for sample in samples if id(sample) in of_sample])


def _dense(found: Sequence[tuple[np.ndarray, Tensor]], size: int) -> Tensor:
    """The values in their places in host memory, 0 elsewhere: float32 [size]."""
    dense = torch.zeros(size, dtype=torch.float32, device="cpu")
    for places, values in found:
        dense.numpy()[places] = values.float().cpu().numpy()
    return dense
