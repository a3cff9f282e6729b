"""Computes attention of packed rows: rows of similar length form one padded batch, without a mask over the
micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verbatim.models.attention import AttentionCall, AttentionPlan
from verbatim.trainer.attention.forest import forest_plan
from verbatim.trainer.attention.padding import Padding

BUCKET_FILL = 0.9
"""A row joins a bucket if its length is at least this fraction of the length of the bucket's longest row, so at most a
tenth of a bucket is padding."""


class RowsPlan:
    """The `AttentionPlan` of concatenated rows: causal attention within each row.

    Rows of similar length are gathered into padded buckets. Padding is at the end of a row, where causality hides it
    from every real token, so no mask is needed and the padding's gradient is 0. The index tensors are built once for
    all layers.

    Example: rows of lengths 3, 9 and 10 become the buckets `[2, 10]` (one place of padding) and `[1, 3]`.

    Legend: U tokens, P places in all buckets together, B rows of a bucket, L length of its longest row, H query heads,
    K key/value heads, D head size of queries and keys, E of values.
    """

    def __init__(self, row_lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Plan attention for concatenated rows of these lengths, all above 0."""
        tokens, real, self.shapes = [], [], []
        for rows in _buckets(row_lengths):
            longest = rows[0][1]
            starts, lengths = torch.tensor(rows, device="cpu").T[:, :, None]
            within = torch.arange(longest, device="cpu")
            tokens.append((starts + torch.minimum(within, lengths - 1)).flatten())
            real.append((within < lengths).flatten())
            self.shapes.append((len(rows), longest))
        self.wanted: Any = None
        """The tokens for which the last layer computes its output (`last_layer.Wanted`); None for all tokens."""
        self._padding = Padding(torch.cat(tokens), torch.cat(real), device)
        self._row_lengths, self._device = row_lengths, torch.device(device)

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, U, H, E]. Inputs: [1, H, U, D], [1, K, U, D], [1, K, U, E]; see `AttentionPlan`."""
        assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == len(self._padding)
        if not call.is_plain:
            return self._forest.attend(layer_index, query_BHTD, key_BKTD, value_BKTD, call)
        queries, keys, values = (
            self._padding.spread(x[0].transpose(0, 1), self.shapes) for x in (query_BHTD, key_BKTD, value_BKTD)
        )
        outs = [
            _causal(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), call.scale, call.sliding_window)
            for query, key, value in zip(queries, keys, values, strict=True)
        ]
        out_PHD = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        return self._padding.collect(out_PHD)[None]

    @cached_property
    def _forest(self) -> AttentionPlan:
        """The plan in which each of these rows is a tree that never branches. Layers with soft caps or sinks use this
        plan, because torch's fused kernel supports neither."""
        lengths = np.array(self._row_lengths)
        ends = np.cumsum(lengths)
        starts = np.repeat(ends - lengths, lengths)
        depths = np.arange(len(starts)) - starts
        return forest_plan(depths.astype(np.int32), np.repeat(ends, lengths).astype(np.int32), self._device)


def _buckets(row_lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rows as (start, length), grouped by similar length, longest first."""
    starts = [0]
    for length in row_lengths:
        assert length > 0
        starts.append(starts[-1] + length)
    rows = sorted(zip(starts[:-1], row_lengths, strict=True), key=lambda row: -row[1])
    buckets: list[list[tuple[int, int]]] = []
    for row in rows:
        if not buckets or row[1] < BUCKET_FILL * buckets[-1][0][1]:
            buckets.append([])
        buckets[-1].append(row)
    return buckets


def _causal(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention, [B, H, L, D]. A sliding window is computed in blocks of queries, at a cost linear in L."""
    length = query_BHLD.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(
            query_BHLD, key_BKLD, value_BKLD, is_causal=True, scale=scale, enable_gqa=True
        )
    outs = []
    for start in range(0, length, window):
        end = min(start + window, length)
        first = max(0, start - window + 1)
        query = torch.arange(start, end, device=query_BHLD.device)[:, None]
        key = torch.arange(first, end, device=query_BHLD.device)[None]
        seen = (key <= query) & (key > query - window)
        outs.append(
            scaled_dot_product_attention(
                query_BHLD[:, :, start:end],
                key_BKLD[:, :, first:end],
                value_BKLD[:, :, first:end],
                attn_mask=seen,
                scale=scale,
                enable_gqa=True,
            )
        )
    return torch.cat(outs, dim=2)
