"""Computes attention of prefix trees by FlexAttention, on CUDA: one kernel that skips what no query of a block sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from verbatim.core.types import Int32
from verbatim.models.attention import AttentionCall

BLOCK = 128
"""Queries and keys of a block of the mask; the tokens of a micro-batch are a multiple of this, by padding."""


class FlexPlan:
    """The `AttentionPlan` of a forest in depth-first order: query q sees key k if `k <= q < ends[k]`.

    Which blocks hold a key that some query sees, and which hold nothing else, is read off the intervals; so no mask
    over the micro-batch ever exists.

    Legend: U tokens, H query heads, K key/value heads, D head size of queries and keys, E of values.
    """

    def __init__(self, position_ids: Int32, ends: Int32, device: torch.device | str) -> None:
        """Plan for tokens with these depths and ends of subtrees: int32 [U] each."""
        assert len(ends) % BLOCK == 0, f"{len(ends)} tokens are no multiple of {BLOCK}"
        self._depths, self._ends = position_ids, ends
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, U, H, E]. Inputs: [1, H, U, D], [1, K, U, D], [1, K, U, E]; see `AttentionPlan`."""
        window = call.sliding_window
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        # Under autocast the three may differ in dtype; the kernel wants contiguous tensors of one.
        query, key, value = (x.to(value_BKTD.dtype).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
        attention = _compiled() if value.is_cuda and value.dtype != torch.float64 else flex_attention
        out, aux = attention(
            query,
            key,
            value,
            score_mod=None if call.softcap is None else _cap(call.softcap),
            block_mask=self._masks[window],
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=call.sinks_H is not None),
        )
        if call.sinks_H is not None:
            share_BHU = torch.sigmoid(aux.lse - call.sinks_H[:, None].to(aux.lse.dtype))
            out = out * share_BHU[..., None].to(out.dtype)
        transposed: Tensor = out.transpose(1, 2)
        return transposed

    def _mask(self, window: int | None) -> BlockMask:
        partial, full = visible_blocks(self._depths, self._ends, window)
        return BlockMask.from_kv_blocks(
            *self._blocks(partial),
            *self._blocks(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=self._mask_mod(window),
            seq_lengths=(len(self._ends), len(self._ends)),
        )

    def _blocks(self, which_RR: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
        """How many blocks each row of blocks has, and their numbers first: int32 [1, 1, R] and [1, 1, R, R]."""
        numbers_RR = np.argsort(~which_RR, axis=1, kind="stable")
        counts_R = which_RR.sum(axis=1)
        return self._ints(counts_R[None, None]), self._ints(numbers_RR[None, None])

    def _ints(self, array: NDArray[Any]) -> Tensor:
        return torch.tensor(array, dtype=torch.int32, device=self._device)

    def _mask_mod(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether a query sees a key, one pair at a time. It holds tensors only: a number would be compiled in."""
        ends = self._ints(self._ends)

        def descends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        if window is None:
            return descends
        depths = self._ints(self._depths)
        out_of_reach = depths - window

        def descends_nearby(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key]) & (depths[key] > out_of_reach[query])

        return descends_nearby


def visible_blocks(depths: Int32, ends: Int32, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Blocks of [queries, keys] in which some query sees some key, and in which all see all, bool [R, R] each; a block
    is in at most one of them. With a window some of the former may hold nothing that is seen.

    Example: a row of 256 tokens: `[[T, F], [F, T]]` and `[[F, F], [T, F]]`.
    """
    rows = len(ends) // BLOCK
    keys = np.arange(len(ends))
    some, all_ = np.zeros((2, rows, rows), dtype=bool)
    for row, start in enumerate(range(0, len(ends), BLOCK)):
        end = start + BLOCK
        seen = np.maximum(keys, start) < np.minimum(ends, end)
        by_all = (keys <= start) & (ends >= end)
        if window is not None:
            seen &= depths[start:end].min() - depths < window
            by_all &= depths[start:end].max() - depths < window
        some[row] = seen.reshape(rows, BLOCK).any(axis=1)
        all_[row] = by_all.reshape(rows, BLOCK).all(axis=1)
    return some & ~all_, all_


@cache
def _cap(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The soft cap, one score at a time; one function for each cap, so that it is compiled once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


@cache
def _compiled() -> Any:
    """Compiled once, for any number of tokens."""
    return torch.compile(flex_attention, dynamic=True)
