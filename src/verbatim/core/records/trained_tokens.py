"""Defines the trainer's report on each trained token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.core.records.fields import Float32
from verbatim.core.records.samples import TrainingSample


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedTokens:
    """The trainer's results for the T trained tokens of a batch, sample by sample in batch order.

    Example: for two samples with masks `[F, T, T]` and `[F, F, T]`, there are 3 trained tokens, and the last trained
        token belongs to the second sample.
    """

    logprobs: Float32
    """The trainer's logprob of each token at the token's sampling temperature, before the optimizer step on the token:
    float32 [T]."""
    gradients: Float32
    """Derivative of the summed loss (not yet normalised) with respect to that logprob: negative if the optimizer step
    makes the token more likely, about 0 if the loss masks the token: float32 [T]."""

    def __post_init__(self) -> None:
        assert self.logprobs.shape == self.gradients.shape, f"{self.logprobs.shape} != {self.gradients.shape}"

    @classmethod
    def joined(cls, parts: Sequence[TrainedTokens]) -> TrainedTokens:
        """The results of several samples, concatenated."""
        empty = cls(logprobs=np.zeros(0, dtype=np.float32), gradients=np.zeros(0, dtype=np.float32))
        parts = [empty, *parts]
        return cls(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            gradients=np.concatenate([part.gradients for part in parts]),
        )

    def by_turn(self, samples: Sequence[TrainingSample]) -> Iterator[tuple[TrainingSample, int, Float32, Float32]]:
        """The sample, the turn index, the logprobs and the gradients of each trained turn. All tokens of a turn are in
        the same sample.

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
