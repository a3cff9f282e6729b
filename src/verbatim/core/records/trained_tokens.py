"""Defines what the trainer says of each token that it trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.core.records.fields import Float32
from verbatim.core.records.samples import TrainingSample


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedTokens:
    """What the trainer computed for the T trained tokens of a batch, sample by sample in its order.

    Example: of two samples with masks `[F, T, T]` and `[F, F, T]`, T is 3, and the last one is the second sample's.
    """

    logprobs: Float32
    """The trainer's logprob of the token, at the temperature of its sampling, before the optimizer step that it was
    trained in: float32 [T]."""
    gradients: Float32
    """The derivative of the loss, summed and not yet divided, by that logprob: below 0 where the optimizer step makes
    the token more likely, about 0 where the loss masks it: float32 [T]."""

    def __post_init__(self) -> None:
        assert self.logprobs.shape == self.gradients.shape, f"{self.logprobs.shape} != {self.gradients.shape}"

    @classmethod
    def joined(cls, parts: Sequence[TrainedTokens]) -> TrainedTokens:
        """Those of several samples, one after the other."""
        empty = cls(logprobs=np.zeros(0, dtype=np.float32), gradients=np.zeros(0, dtype=np.float32))
        parts = [empty, *parts]
        return cls(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            gradients=np.concatenate([part.gradients for part in parts]),
        )

    def by_turn(self, samples: Sequence[TrainingSample]) -> Iterator[tuple[TrainingSample, int, Float32, Float32]]:
        """Sample, turn, logprobs and gradients of each turn that was trained. A turn's tokens are in one sample.

        Args:
            samples: The batch.
        """
        start = 0
        for sample in samples:
            for chunk, count in sample.trained_chunks():
                at = slice(start, start + count)
                yield sample, chunk, self.logprobs[at], self.gradients[at]
                start += count
        assert start == len(self.logprobs), f"{len(self.logprobs)} tokens of a batch that has {start}"
