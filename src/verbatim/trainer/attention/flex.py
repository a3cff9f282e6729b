"""Computes attention of prefix trees on CUDA with FlexAttention: one kernel, which skips blocks of keys that no query
sees."""

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
"""Block size of the mask, in queries and in keys. Micro-batches are padded to a multiple of this many tokens."""


class FlexPlan:
    """The `AttentionPlan` of a forest in depth-first order: query q sees key k if `k <= q < ends[k]`.

    The intervals from k to `ends[k]` determine which blocks are partly or fully visible, so a mask over the whole
    micro-batch is never materialised.

    Legend: U tokens, H query heads, K key/value heads, D head size of queries and keys, E of values.
    """

    def __init__(self, position_ids: Int32, ends: Int32, device: torch.device | str) -> None:
        """Plan attention for tokens with these depths and subtree ends: int32 [U] each."""
        assert len(ends) % BLOCK == 0, f"{len(ends)} tokens are not a multiple of {BLOCK}"
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
        # Under autocast the three may differ in dtype; the kernel needs contiguous tensors of the same dtype.
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
            # A sink adds one score to each softmax, with a value of 0. So the output with the sink is the output
            # without it, scaled by the share of the softmax that the keys keep: exp(lse) / (exp(lse) + exp(sink)).
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
        """Return (1) the number of selected blocks in each row of blocks, int32 [1, 1, R], and (2) the block indices of
        each row, selected blocks first, int32 [1, 1, R, R]. `BlockMask.from_kv_blocks` expects this format."""
        numbers_RR = np.argsort(~which_RR, axis=1, kind="stable")
        counts_R = which_RR.sum(axis=1)
        return self._ints(counts_R[None, None]), self._ints(numbers_RR[None, None])

    def _ints(self, array: NDArray[Any]) -> Tensor:
        return torch.tensor(array, dtype=torch.int32, device=self._device)

    def _mask_mod(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """A function that decides whether a query sees a key. It closes over tensors only: a Python number would be
        compiled in as a constant, and the kernel would be recompiled for each micro-batch."""
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
    """Return (1) which blocks of [queries, keys] are partly visible and (2) which are fully visible: bool [R, R] each,
    never both true for a block. With a window, a block marked as partly visible may contain no visible pair.

    Example: a row of 256 tokens gives (1) `[[T, F], [F, T]]` and (2) `[[F, F], [T, F]]`.
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
    """The score function of a soft cap. It is cached, so that each cap has a single function object, which is compiled
    only once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


@cache
def _compiled() -> Any:
    """FlexAttention, compiled once per process for any number of tokens."""
    return torch.compile(flex_attention, dynamic=True)
