"""Samples tokens and their logprobs from rows of logits. Random numbers are a function of (seed, position) only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.core.types import KeptSets

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: the increment of splitmix64


def seed_key(seed: int) -> int:
    """Mix any integer seed into a 64-bit key, so that adjacent seeds give unrelated numbers."""
    return int(_mix(np.array([(seed * _GOLDEN + _GOLDEN) & _MASK64], dtype=np.uint64))[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each pair of key and position, the same in every batch and process.

    This uses splitmix64 as a counter-based generator (Steele, Lea, Flood 2014): state number `position` of the stream
    `key`. The result is the upper 52 bits plus one half, times 2^-52, so that neither 0 nor 1 can occur.

    Args:
        keys: `seed_key` of each row's seed: uint64 [N].
        positions: Position, in its sequence, of the token to be sampled: int64 [N].
    """
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return ((_mix(state) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_RANKED = 256
"""How many of a row's largest logits are sorted first to find the edge of the nucleus (top-p). This number is
multiplied by 8 until the edge is among the sorted logits, because sorting the whole vocabulary is slow."""


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Truncation of each row: top-k, then top-p of what top-k keeps, then min-p."""

    top_k_N: Tensor
    """int64 [N]; 0 means off."""
    top_p_N: Tensor
    """float32 [N]; 1 means off."""
    min_p_N: Tensor
    """float32 [N]; 0 means off."""

    def kept(self, logits_NV: Tensor) -> Tensor:
        """The kept sets: bool [N, V].

        Equal logits are kept or dropped together, so ties at the edge make a kept set larger. The most likely token is
        always kept.
        """
        weights_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)).exp()
        kept_NV = weights_NV >= self.min_p_N[:, None]
        if bool((self.top_k_N > 0).any() | (self.top_p_N < 1).any()):
            kept_NV &= logits_NV >= self._least(logits_NV, weights_NV)[:, None]
        return kept_NV

    def _least(self, logits_NV: Tensor, weights_NV: Tensor) -> Tensor:
        """The smallest logit that top-k and then top-p keep: [N]. `weights_NV` are probabilities divided by the row's
        largest probability."""
        vocab = logits_NV.shape[-1]
        is_limited_N, has_nucleus_N = self.top_k_N > 0, self.top_p_N < 1
        top_k_N = self.top_k_N.clamp(min=1, max=vocab)
        count = max(_RANKED, int(top_k_N.max()))
        while True:
            ranked_NR, order_NR = logits_NV.topk(min(count, vocab), dim=-1)
            least_N = ranked_NR.gather(-1, top_k_N[:, None] - 1)[:, 0].where(is_limited_N, -torch.inf)
            mass_N = weights_NV.where(logits_NV >= least_N[:, None], 0.0).sum(-1, dtype=torch.float64) * self.top_p_N
            ranked_weights_NR = weights_NV.gather(-1, order_NR).where(ranked_NR >= least_N[:, None], 0.0)
            sums_NR = ranked_weights_NR.cumsum(-1, dtype=torch.float64)
            if count >= vocab or not bool((has_nucleus_N & ~(sums_NR[:, -1] >= mass_N)).any()):
                break
            count *= 8
        edge_N = (sums_NR < mass_N[:, None]).sum(-1).clamp(max=ranked_NR.shape[-1] - 1)
        nucleus_N = ranked_NR.gather(-1, edge_N[:, None])[:, 0].where(has_nucleus_N, -torch.inf)
        return torch.maximum(least_N, nucleus_N)


def draw(
    logits_NV: Tensor, temperatures_N: Tensor, uniforms_N: Tensor, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample one token per row by the inverse CDF, with its logprob under the distribution it was sampled from.

    Args:
        logits_NV: Any float dtype, converted to float32: [N, V].
        temperatures_N: float32 [N]; at 0 the row's most likely token is taken, with logprob 0 (a point mass).
        uniforms_N: float64 [N], in (0, 1).
        truncation: Truncation of each row; None if no row is truncated.

    Returns:
        (tokens, int64 [N]; logprobs, float32 [N], <= 0, or NaN if the row's logits are not finite; kept sets, bool [N,
        V], or None if no row is truncated).

    Example:
        logits log([1, 2, 1]) at temperature 1 have the CDF [0.25, 0.75, 1], so 0.5 samples token 1, with logprob
        log(0.5).
    """
    greedy = temperatures_N == 0
    logits = logits_NV.float() / torch.where(greedy, 1.0, temperatures_N)[:, None]
    kept = None
    if truncation is not None:
        kept = truncation.kept(logits)
        logits = logits.masked_fill(~kept, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    logits -= top  # done in place, because the division above made a copy
    # Summed in float64, because a float32 CDF of a large vocabulary would lose its tail.
    cdf = logits.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # `right` finds the first entry above the target, so a token of probability zero is never taken.
    tokens = torch.searchsorted(cdf, uniforms_N[:, None] * total, right=True).clamp_(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    logprobs = (logits.gather(-1, tokens).double() - total.log()).clamp_(max=0.0)
    logprobs = torch.where(greedy[:, None] & total.isfinite(), 0.0, logprobs)
    return tokens[:, 0], logprobs[:, 0].float(), kept


def kept_sets(kept_NV: Tensor) -> KeptSets:
    """Convert kept sets from bool [N, V]. The set is empty for a row that was not truncated."""
    rows = kept_NV.cpu().numpy()
    rows = rows & ~rows.all(axis=1, keepdims=True)
    return KeptSets.of_counts(rows.nonzero()[1].astype(np.int32), rows.sum(axis=1))
