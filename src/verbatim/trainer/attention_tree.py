"""Attention of prefix trees: each token sees its ancestors and itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verbatim.trainer.places import Places
from verbatim.types import Int32

QUERY_FILL, KEY_FILL = 0.6, 0.75
"""A run joins a bucket of longer ones where its queries and its keys are at least these shares of theirs."""

Runs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Runs of like sizes. Legend: B runs, Q their largest number of queries, P their longest path."""

    shape: tuple[int, int]
    """B, Q."""
    keys_BP: Tensor
    """The path of each run, from the root to its last token: int64; padding repeats the last one."""
    depths_B: Tensor
    """Depth of each run's first query: int64."""


class TreePlan:
    """The `AttentionPlan` of a forest in depth-first order.

    The tokens fall into runs: each token of a run is the child of the one before it. The queries of a run are scored
    against the path from the root to its end. So nothing is scored against another branch and there is no mask over
    the micro-batch; attention costs at most what it costs in rows. Runs of like sizes are padded to one batch.

    Example: a path of 3 tokens from the root with branches of 2 and of 1 tokens: the runs `[0, 1, 2, 3, 4]` and `[5]`;
    the path of the latter is `[0, 1, 2, 5]`.

    Legend: U tokens, H query heads, K key/value heads, D head size.
    """

    def __init__(self, position_ids: Int32, ends: Int32, device: torch.device | str = "cpu") -> None:
        """Plan for tokens with these depths and ends of subtrees: int32 [U] each."""
        depths = position_ids.astype(np.int64)
        begins = np.flatnonzero(np.append(True, ends[:-1] <= np.arange(1, len(ends))))
        lengths = np.diff(np.append(begins, len(depths)))
        paths = _paths(begins, lengths, depths[begins])
        self._buckets = []
        tokens, real = [], []
        for runs in _alike(lengths, depths[begins] + lengths):
            queries, keys = int(lengths[runs].max()), max(len(paths[run]) for run in runs)
            within = np.arange(queries)
            tokens.append((begins[runs, None] + np.minimum(within, lengths[runs, None] - 1)).ravel())
            real.append((within < lengths[runs, None]).ravel())
            keys_BP = np.stack([np.pad(paths[run], (0, keys - len(paths[run])), mode="edge") for run in runs])
            self._buckets.append(
                _Bucket(
                    shape=(len(runs), queries),
                    keys_BP=torch.from_numpy(keys_BP).to(device),
                    depths_B=torch.from_numpy(depths[begins[runs]]).to(device),
                )
            )
        self._places = Places(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(real)), device)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self,
        layer_index: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """The attention output, [1, U, H, D].

        Args:
            layer_index: Not used: all layers share the plan.
            query_BHTD: [1, H, U, D].
            key_BKTD: [1, K, U, D].
            value_BKTD: [1, K, U, D].
            scale: Multiplies the scores.
            sliding_window: Ancestors a query sees, itself included; None = all.
        """
        query_UHD, key_UKD, value_UKD = (x[0].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
        queries = self._places.spread(query_UHD, [bucket.shape for bucket in self._buckets])
        outs = []
        for number, (bucket, query_BQHD) in enumerate(zip(self._buckets, queries, strict=True)):
            keys = bucket.keys_BP
            key, value = (x.index_select(0, keys.ravel()).view(*keys.shape, *x.shape[1:]) for x in (key_UKD, value_UKD))
            out = scaled_dot_product_attention(
                query_BQHD.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                attn_mask=self._mask(number, sliding_window), scale=scale, enable_gqa=True,
            )  # fmt: skip
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return self._places.collect(torch.cat(outs))[None]

    def _mask(self, number: int, window: int | None) -> Tensor:
        """Who sees whom: bool [B, 1, Q, P]; a path's place is its depth. Shared by all layers of a window."""
        if (number, window) not in self._masks:
            bucket = self._buckets[number]
            key = torch.arange(bucket.keys_BP.shape[1], device=bucket.keys_BP.device)
            query = bucket.depths_B[:, None] + torch.arange(bucket.shape[1], device=key.device)
            query = query[:, None, :, None]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            self._masks[number, window] = seen
        return self._masks[number, window]


def _paths(begins: Runs, lengths: Runs, depths: Runs) -> list[Runs]:
    """The tokens from the root to the end of each run."""
    path = np.empty(int((depths + lengths).max()), dtype=np.int64)
    paths = []
    for begin, length, depth in zip(begins.tolist(), lengths.tolist(), depths.tolist(), strict=True):
        path[depth : depth + length] = np.arange(begin, begin + length)
        paths.append(path[: depth + length].copy())
    return paths


def _alike(lengths: Runs, path_lengths: Runs) -> list[Runs]:
    """Runs of like numbers of queries and keys, together."""
    buckets: list[list[int]] = []
    by_length = np.lexsort((-path_lengths, -lengths))
    strips: list[list[int]] = []
    for run in by_length.tolist():
        if not strips or lengths[run] < QUERY_FILL * lengths[strips[-1][0]]:
            strips.append([])
        strips[-1].append(run)
    for strip in strips:
        ordered = sorted(strip, key=lambda run: -path_lengths[run])
        for run in ordered:
            if not buckets or run == ordered[0] or path_lengths[run] < KEY_FILL * path_lengths[buckets[-1][0]]:
                buckets.append([])
            buckets[-1].append(run)
    return [np.array(bucket, dtype=np.int64) for bucket in buckets]
