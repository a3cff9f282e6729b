"""Computes attention of prefix trees in blocks of queries: each token sees its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verbatim.core.types import Int32
from verbatim.models.attention import AttentionCall
from verbatim.trainer.attention.native_tree import NativeForest, suits
from verbatim.trainer.linear import product

BLOCK = 128
"""Number of queries scored together."""
KEY_MULTIPLE = 64
"""The keys of a block are padded to a multiple of this, so that the shapes of matrix products recur (see
`linear.ROW_MULTIPLE`)."""


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The keys of a block of neighbouring queries. Legend: Q queries, P keys, M keys that need a mask."""

    keys_P: Tensor
    """Token indices: the keys that all queries see come first, padding comes last. int64 [P]."""
    mask_Q1M: Tensor
    """What is added to the scores of the last M keys: 0 if the query sees the key, otherwise -inf. float32 [Q, 1,
    M]."""


class TreePlan:
    """The `AttentionPlan` of a forest in depth-first order.

    The ancestors of a block's queries lie on the path to its first query or in the block itself. So a block is scored
    against these tokens only, and the mask covers only keys that at least one query in the block does not see. Scores
    exist for one block and one key/value head at a time and are recomputed in the backward pass. Only queries, keys and
    values are saved, and there is never a mask over the whole micro-batch.

    Example: a path of 3 tokens from the root with branches of 2 and of 1 tokens, in blocks of 3: the keys of the second
    block are all six tokens; the last query does not see the fourth and the fifth.

    Legend: U tokens, Q tokens that have queries, H query heads, K key/value heads, G query heads per key/value head, D
    head size of queries and keys, E head size of values (often D too).
    """

    def __init__(self, position_ids: Int32, ends: Int32, device: torch.device | str = "cpu") -> None:
        """Plan attention for tokens with these depths and subtree ends: int32 [U] each."""
        self._depths = position_ids.astype(np.int64)
        self._ends = ends.astype(np.int64)
        self._device = device
        self._blocks: dict[int | None, list[_Block]] = {}
        self.wanted: Any = None
        """The tokens for which the last layer computes its output (`last_layer.Wanted`); None for all tokens."""
        self.rounds = False
        """True to round the factors of products to bfloat16 (see `NativeForest.attend`)."""
        self._native: dict[tuple[int | None, int, bool], NativeForest] = {}

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, U, H, E]. Inputs: [1, H, U, D], [1, K, U, D], [1, K, U, E]; see `AttentionPlan`."""
        assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == len(self._depths)
        if suits(query_BHTD.shape[1], key_BKTD, value_BKTD, call):
            return self.attend_some(None, query_BHTD, key_BKTD, value_BKTD, call)
        if call.sliding_window not in self._blocks:
            self._blocks[call.sliding_window] = self._plan(call.sliding_window)
        blocks = self._blocks[call.sliding_window]
        num_keys = key_BKTD.shape[1]
        _, heads, tokens, size = query_BHTD.shape
        query_KUGD = query_BHTD.reshape(num_keys, heads // num_keys, tokens, size).transpose(1, 2) * call.scale
        sinks_KG = None if call.sinks_H is None else call.sinks_H.reshape(num_keys, -1)
        out_KUGE: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
            query_KUGD, key_BKTD[0], value_BKTD[0], sinks_KG, call.softcap, blocks
        )
        return out_KUGE.transpose(0, 1).flatten(1, 2)[None]

    def attend_some(
        self, tokens: Int32 | None, query_BHQD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output for some tokens only, [1, Q, H, E], for inputs that the C functions accept (`suits`).

        Args:
            tokens: The tokens that have queries, ascending: int32 [Q]; None if all tokens have queries.
            query_BHQD: Their queries, [1, H, Q, D].
            key_BKTD: Keys of all tokens, [1, K, U, D].
            value_BKTD: Values of all tokens, [1, K, U, E].
            call: The layer's settings.
        """
        window, groups = call.sliding_window, query_BHQD.shape[1] // key_BKTD.shape[1]
        kind = (window, groups, tokens is None)
        if kind not in self._native:  # layers may differ in these
            depths, ends = (x.astype(np.int32) for x in (self._depths, self._ends))
            self._native[kind] = NativeForest(depths, ends, window, groups, tokens)
        query_QHD, key_UKD, value_UKE = (x[0].transpose(0, 1) for x in (query_BHQD, key_BKTD, value_BKTD))
        return self._native[kind].attend(query_QHD, key_UKD, value_UKE, call.scale, rounds=self.rounds)[None]

    def _plan(self, window: int | None) -> list[_Block]:
        blocks = []
        path = np.zeros(int(self._depths.max()) + 1, dtype=np.int64)
        for start in range(0, len(self._depths), BLOCK):
            own = np.arange(start, min(start + BLOCK, len(self._depths)))
            depths = self._depths[own]
            first = 0 if window is None else max(0, int(depths.min()) - window + 1)
            keys = np.concatenate([path[first : depths[0]], own])
            path[depths] = own  # numpy keeps the last write to each depth, so this is the path to the next block
            padding = np.zeros(-len(keys) % KEY_MULTIPLE, dtype=np.int64)
            keys, ends = np.append(keys, padding), np.append(self._ends[keys], padding)
            seen = (keys <= own[:, None]) & (own[:, None] < ends)
            if window is not None:
                seen &= depths[:, None] - self._depths[keys] < window
            by_all = int(np.append(seen.all(axis=0), False).argmin())  # all queries see the leading keys: no mask
            mask = np.where(seen[:, None, by_all:], np.float32(0), np.float32(-np.inf))
            blocks.append(
                _Block(
                    keys_P=torch.from_numpy(keys).to(self._device),
                    mask_Q1M=torch.from_numpy(mask).to(self._device),
                )
            )
        return blocks


class _TreeAttention(torch.autograd.Function):
    """Softmax attention in at least float32. Legend: R = Q G, the queries of a block in all heads that share keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query_KUGD: Tensor,
        key_KUD: Tensor,
        value_KUE: Tensor,
        sinks_KG: Tensor | None,
        softcap: float | None,
        blocks: Sequence[_Block],
    ) -> Tensor:
        ctx.save_for_backward(query_KUGD, key_KUD, value_KUE, sinks_KG)
        ctx.softcap, ctx.blocks = softcap, blocks
        outs = []
        sinks = _sinks(sinks_KG, len(key_KUD))
        for queries, key_UD, value_UE, sinks_G in zip(
            _by_block(query_KUGD), _exact(key_KUD), _exact(value_KUE), sinks, strict=True
        ):
            for block, queries_RD in zip(blocks, queries, strict=True):
                keys_PD = key_UD.index_select(0, block.keys_P)
                weights_RP = _weights(queries_RD, keys_PD, block, softcap, sinks_G).weights_RP
                outs.append(product(weights_RP, value_UE.index_select(0, block.keys_P).T))
        return torch.cat(outs).view(*query_KUGD.shape[:3], value_KUE.shape[2]).to(value_KUE.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_KUGD, key_KUD, value_KUE, sinks_KG = ctx.saved_tensors
        keys, values = _exact(key_KUD), _exact(value_KUE)
        grad_queries, grad_keys, grad_values = [], torch.zeros_like(keys), torch.zeros_like(values)
        grad_sinks_KG = None if sinks_KG is None else torch.zeros_like(sinks_KG, dtype=keys.dtype)
        sinks = _sinks(sinks_KG, len(keys))
        for head, (queries, outs) in enumerate(zip(_by_block(query_KUGD), _by_block(grads[0]), strict=True)):
            for block, queries_RD, grad_RE in zip(ctx.blocks, queries, outs, strict=True):
                keys_PD = keys[head].index_select(0, block.keys_P)
                found = _weights(queries_RD, keys_PD, block, ctx.softcap, sinks[head])
                grad_weights_RP = product(grad_RE, values[head].index_select(0, block.keys_P))
                if grad_sinks_KG is not None and found.sink_R is not None:
                    mean_R = torch.linalg.vecdot(grad_weights_RP, found.weights_RP)
                    grad_sinks_KG[head] -= (found.sink_R * mean_R).view(-1, sinks_KG.shape[1]).sum(0)
                # p * (g - sum of p g) also holds with a sink, although the weights then sum to less than 1, because a
                # sink has no value
                grad_scores_RP = torch._softmax_backward_data(
                    grad_weights_RP, found.weights_RP, -1, found.weights_RP.dtype
                )
                if found.slope_RP is not None:
                    grad_scores_RP = grad_scores_RP * found.slope_RP
                grad_queries.append(product(grad_scores_RP, keys_PD.T))
                grad_keys[head].index_add_(0, block.keys_P, product(queries_RD.T, grad_scores_RP.T).T)
                grad_values[head].index_add_(0, block.keys_P, product(grad_RE.T, found.weights_RP.T).T)
        grad_query = torch.cat(grad_queries).view_as(query_KUGD)
        return grad_query, grad_keys, grad_values, grad_sinks_KG, None, None  # autograd casts to input dtypes


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _sinks(sinks_KG: Tensor | None, num_kv_heads: int) -> Sequence[Tensor | None]:
    return [None] * num_kv_heads if sinks_KG is None else list(_exact(sinks_KG))


def _by_block(x_KUGD: Tensor) -> list[tuple[Tensor, ...]]:
    """The blocks of queries of each key/value head: [R, D] each (or [R, E] for outputs)."""
    return [x_RD.split(BLOCK * x_KUGD.shape[2]) for x_RD in _exact(x_KUGD).flatten(1, 2)]


@dataclass(frozen=True)
class _Weights:
    """The attention weights of a block, and what their backward pass needs."""

    weights_RP: Tensor
    """Softmax of the masked scores; with a sink, scaled down by the sink's share."""
    sink_R: Tensor | None
    """The sink's share of each query's softmax; None without sinks."""
    slope_RP: Tensor | None
    """d(capped score) / d(score); None without a soft cap."""


def _weights(
    queries_RD: Tensor, keys_PD: Tensor, block: _Block, softcap: float | None, sinks_G: Tensor | None
) -> _Weights:
    scores_RP = product(queries_RD, keys_PD)
    slope_RP = None
    if softcap is not None:
        tanh_RP = scores_RP.div_(softcap).tanh_()
        slope_RP = 1 - tanh_RP.square()
        scores_RP = tanh_RP * softcap
    num_queries, _, num_masked = block.mask_Q1M.shape
    scores_QGP = scores_RP.view(num_queries, -1, len(keys_PD))
    scores_QGP.narrow(2, len(keys_PD) - num_masked, num_masked).add_(block.mask_Q1M)
    weights_RP = scores_RP.softmax(-1)
    if sinks_G is None:
        return _Weights(weights_RP, None, slope_RP)
    sink_R = torch.sigmoid((sinks_G - scores_QGP.logsumexp(-1)).flatten())
    return _Weights(weights_RP * (1 - sink_R)[:, None], sink_R, slope_RP)
