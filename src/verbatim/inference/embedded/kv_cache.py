"""Stores the keys and values of every sequence, and computes attention over them (`CachePlan`).

Legend: T rows of one flat forward pass, H query heads, K key/value heads, G = H / K, D head size, S slots, C keys, B
    sequences of a group, Q queries per sequence, P keys that the group's sequences share.

Slots are contiguous in memory, so that a batched matrix product reads any range of slots in place. A masked key has
probability exp(-inf) = 0 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.models.attention import AttentionCall

BLOCK = 64
"""Number of keys in a block of block-wise attention. The capacity of a cache is a multiple of this number."""


@dataclass(frozen=True, kw_only=True)
class KeyValueShape:
    """Shape of one token's keys and values, the same in every layer."""

    num_layers: int
    num_kv_heads: int
    """K: key/value heads."""
    key_size: int
    """D (head size) of keys and queries."""
    value_size: int
    """D (head size) of values."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize


class Prefix(NamedTuple):
    """Keys and values of a sequence's prefix: [K, D, P] and [K, P, D] of one layer if a group shares the prefix, or
    [layers, K, D, C] and [layers, K, C, D] if it is parked outside the batch."""

    keys: Tensor
    values: Tensor


class KeyValueCache:
    """Keys [layers, S, K, D, C] and values [layers, S, K, C, D]. C grows with the longest sequence.

    The key layout is the fastest for products with few queries: a quarter faster than [S, K, C, D].
    """

    def __init__(self, shape: KeyValueShape, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        head = (shape.num_layers, num_slots, shape.num_kv_heads)
        self.keys = torch.empty(*head, shape.key_size, 0, dtype=dtype, device=device)
        self.values = torch.empty(*head, 0, shape.value_size, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Number of tokens that each slot can hold now."""
        return self.keys.shape[4]

    def reserve(self, num_tokens: int) -> None:
        """Grow for sequences of this many tokens. The size at least doubles, so that growing costs O(1) per token."""
        if num_tokens > self.capacity:
            capacity = max(up_to(num_tokens, BLOCK), 2 * self.capacity)
            # Use zeros instead of `empty`, because a masked key has weight 0, and 0 * NaN would be NaN.
            keys = self.keys.new_zeros(*self.keys.shape[:4], capacity)
            values = self.values.new_zeros(*self.values.shape[:3], capacity, self.values.shape[4])
            keys[..., : self.capacity], values[..., : self.capacity, :] = self.keys, self.values
            self.keys, self.values = keys, values

    def shrink(self, num_tokens: int) -> None:
        """Shrink to sequences of this many tokens; keys and values of later tokens are dropped."""
        capacity = up_to(num_tokens, BLOCK)
        if capacity < self.capacity:
            keys, values = self.keys[..., :capacity], self.values[..., :capacity, :]
            self.keys, self.values = (part.clone(memory_format=torch.contiguous_format) for part in (keys, values))

    def drop(self) -> None:
        """Free all keys and values. This allocates nothing, so it works even after memory ran out."""
        self.keys, self.values = self.keys[..., :0].clone(), self.values[..., :0, :].clone()

    def keep(self, slot: int, num_tokens: int) -> Prefix:
        """Copy a slot's prefix to memory outside the batch, before another sequence takes the slot."""
        return Prefix(self.keys[:, slot, :, :, :num_tokens].clone(), self.values[:, slot, :, :num_tokens].clone())

    def restore(self, kept: Prefix, slot: int, num_tokens: int) -> None:
        """Copy a kept prefix into a slot, up to `num_tokens`."""
        self.reserve(num_tokens)
        self.keys[:, slot, :, :, :num_tokens] = kept.keys[:, :, :, :num_tokens]
        self.values[:, slot, :, :num_tokens] = kept.values[:, :, :num_tokens]

    def copy_prefix(self, source: int, slot: int, num_tokens: int) -> None:
        """Copy a prefix from one slot to another."""
        self.keys[:, slot, :, :, :num_tokens] = self.keys[:, source, :, :, :num_tokens]
        self.values[:, slot, :, :num_tokens] = self.values[:, source, :, :num_tokens]

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Do nothing. Later tokens are masked until they are overwritten."""

    def release(self, kept: Prefix) -> None:
        """Do nothing. The memory of a kept prefix is freed with the object."""

    def clear(self, slots: int | slice = slice(None)) -> None:
        """Zero slots that may hold NaN or infinity, because 0 * NaN is NaN, which no mask can hide."""
        self.keys[:, slots] = 0
        self.values[:, slots] = 0


def up_to(number: int, multiple: int) -> int:
    """Round up to a multiple.

    >>> up_to(64, 64), up_to(65, 64)
    (64, 128)
    """
    return -(-number // multiple) * multiple


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionGroup:
    """Sequences whose attention is computed together: B sequences with Q queries each, padded."""

    rows: Tensor | slice
    """Rows of the pass that are queries: int64 [R], or a range."""
    cells: Tensor | None
    """Flat index of each row in the [B, Q] grid: int64 [R]; None if the rows fill the grid in order, without
    padding."""
    slots: Tensor | slice
    """The slot of each sequence: int64 [B] if the keys are copied, or a range if the keys are read in place."""
    positions_BQ: Tensor
    """Position of each query: int64 [B, Q]; 0 in the padding."""
    num_keys: int
    """C, the number of keys, which is larger than the last position."""
    prefix: int = 0
    """Length of the prefix that all sequences share. Its keys and values are read only once, from `prefix_slot`."""
    prefix_slot: int = 0
    """A slot that holds the shared prefix."""


@dataclass(kw_only=True, eq=False)
class CachePlan:
    """The attention of one pass. It writes the tokens' keys and values, and attends to the cache of each slot."""

    cache: KeyValueCache
    write_rows: Tensor | None
    """Rows that are real tokens: int64 [W]; None if all rows are."""
    write_slots: Tensor
    """Slot of each real token: int64 [W]."""
    write_positions: Tensor
    """Position of each real token: int64 [W]."""
    groups: Sequence[AttentionGroup]
    """The groups cover every row whose output matters. If two groups cover a row, the later group counts."""
    in_blocks: bool
    """True to compute attention so that no bit depends on a group's size or on its longest sequence (deterministic
    mode)."""
    _biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, T, H, D]."""
        self._write(layer_index, key_BKTD[0].transpose(0, 1), value_BKTD[0].transpose(0, 1))
        query_THD = query_BHTD[0].transpose(0, 1) * call.scale
        whole = slice(0, len(query_THD))
        out: Tensor | None = None
        for index, group in enumerate(self.groups):
            bias = self._bias(index, call.sliding_window)
            attended = self._attend_group(layer_index, group, query_THD[group.rows], bias, call)
            if out is None:
                if group.rows == whole:
                    out = attended
                    continue
                out = query_THD.new_zeros(*query_THD.shape[:2], self.cache.shape.value_size)
            out[group.rows] = attended
        assert out is not None
        return out[None]

    def _write(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> None:
        if self.write_rows is not None:
            key_TKD, value_TKD = key_TKD[self.write_rows], value_TKD[self.write_rows]
        self.cache.keys[layer][self.write_slots, :, :, self.write_positions] = key_TKD
        self.cache.values[layer][self.write_slots, :, self.write_positions] = value_TKD

    def _bias(self, index: int, sliding_window: int | None) -> Tensor:
        """Attention bias: 0 where a query may attend, -inf elsewhere: float32 [B, 1, 1, Q, C]; layers with the same
        window size share it."""
        bias = self._biases.get((index, sliding_window))
        if bias is None:
            group = self.groups[index]
            positions = group.positions_BQ[:, None, None, :, None]
            keys = torch.arange(group.num_keys, device=positions.device)
            hidden = keys > positions
            if sliding_window is not None:
                hidden |= keys <= positions - sliding_window
            bias = torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, -torch.inf)
            self._biases[index, sliding_window] = bias
        return bias

    def _attend_group(
        self, layer: int, group: AttentionGroup, query_RHD: Tensor, bias: Tensor, call: AttentionCall
    ) -> Tensor:
        batch, queries = group.positions_BQ.shape
        if group.cells is not None:
            padded = query_RHD.new_zeros(batch * queries, *query_RHD.shape[1:])
            padded[group.cells] = query_RHD
            query_RHD = padded
        own = slice(group.prefix, group.num_keys)
        keys, values = self.cache.keys[layer, ..., own], self.cache.values[layer, :, :, own]
        if isinstance(group.slots, slice):
            keys, values = keys[group.slots], values[group.slots]
        else:
            keys, values = keys.index_select(0, group.slots), values.index_select(0, group.slots)
        query_BQHD = query_RHD.reshape(batch, queries, *query_RHD.shape[1:])
        if self.in_blocks:
            out = attend_in_blocks(query_BQHD, keys, values, bias, call)
        else:
            out = attend_at_once(query_BQHD, keys, values, bias, call, self._prefix(layer, group))
        out = out.flatten(0, 1)
        return out if group.cells is None else out[group.cells]

    def _prefix(self, layer: int, group: AttentionGroup) -> Prefix | None:
        if not group.prefix:
            return None
        of_slot = (layer, group.prefix_slot)
        return Prefix(self.cache.keys[of_slot][..., : group.prefix], self.cache.values[of_slot][:, : group.prefix])


def attend_at_once(
    query_BQHD: Tensor,
    keys_BKDC: Tensor,
    values_BKCD: Tensor,
    bias: Tensor,
    call: AttentionCall,
    prefix: Prefix | None = None,
) -> Tensor:
    """Softmax attention for queries that are already scaled: [B, Q, H, D].

    Args:
        query_BQHD: Scaled queries; H is a multiple of K, and query heads of one key/value head are adjacent.
        keys_BKDC: Keys, without the keys of `prefix`.
        values_BKCD: Values, without the values of `prefix`.
        bias: 0 or -inf, float32, broadcast to [B, K, G, Q, P + C]; every query attends to at least one key.
        call: The layer's parameters. Its soft cap and sinks are applied here; its scale is already in the queries, its
            window in the bias.
        prefix: Keys and values at the positions before `keys_BKDC`, the same for all sequences. They are read only
            once, by one product whose rows are the queries of all sequences.
    """
    batch, queries, heads, _ = query_BQHD.shape
    kv_heads, num_shared = keys_BKDC.shape[1], 0 if prefix is None else prefix.keys.shape[2]
    query = _by_kv_head(query_BQHD, kv_heads)
    products = torch.bmm(query, keys_BKDC.flatten(0, 1))
    if prefix is not None:
        products = torch.cat([_per_sequence(torch.bmm(_all_rows(query, batch), prefix.keys), batch), products], dim=-1)
    scores = call.capped(products.float())
    grid = scores.view(batch, kv_heads, -1, queries, scores.shape[-1])
    grid.add_(bias)
    weights = scores.softmax(-1)
    # A sink adds one logit to the softmax's denominator: exp(sums) / (exp(sums) + exp(sink)).
    if call.sinks_H is not None:
        sums = grid.logsumexp(-1, keepdim=True)
        weights.view_as(grid).mul_(torch.sigmoid(sums - _by_row(call.sinks_H, kv_heads)))
    weights = weights.to(values_BKCD.dtype)
    out = torch.bmm(weights[..., num_shared:], values_BKCD.flatten(0, 1))
    if prefix is not None:
        out += _per_sequence(torch.bmm(_all_rows(weights[..., :num_shared], batch), prefix.values), batch)
    return out.view(batch, heads, queries, -1).transpose(1, 2)


def _all_rows(x: Tensor, batch: int) -> Tensor:
    """[B * K, R, N] to [K, B * R, N]: the rows of all sequences together, for products with keys or values that all
    sequences share."""
    kv_heads = len(x) // batch
    return x.view(batch, kv_heads, *x.shape[1:]).transpose(0, 1).reshape(kv_heads, -1, x.shape[-1])


def _per_sequence(x: Tensor, batch: int) -> Tensor:
    """The inverse of `_all_rows`."""
    return x.view(len(x), batch, -1, x.shape[-1]).transpose(0, 1).flatten(0, 1)


def attend_in_blocks(
    query_BQHD: Tensor, keys_BKDC: Tensor, values_BKCD: Tensor, bias: Tensor, call: AttentionCall
) -> Tensor:
    """The same result as `attend_at_once`, from products of one shape. C is a multiple of `BLOCK`.

    Matrix kernels may add in a different order for a different shape, so only equal shapes give equal bits. Blocks are
    combined in order. Blocks beyond a sequence's end add exact zeros, so they do not change any bit of its result.
    """
    batch, queries, heads, _ = query_BQHD.shape
    kv_heads, num_keys = keys_BKDC.shape[1], keys_BKDC.shape[3]
    query = _by_kv_head(query_BQHD, kv_heads)
    blocks = [slice(start, start + BLOCK) for start in range(0, num_keys, BLOCK)]
    keys, values = keys_BKDC.flatten(0, 1), values_BKCD.flatten(0, 1)
    scores = call.capped(torch.stack([torch.bmm(query, keys[:, :, block]).float() for block in blocks]))
    grid = scores.view(len(blocks), batch, kv_heads, -1, queries, BLOCK)
    grid += bias.view(*bias.shape[:-1], len(blocks), BLOCK).movedim(-2, 0)
    largest = grid.amax((0, -1), keepdim=True)
    sinks = None if call.sinks_H is None else _by_row(call.sinks_H, kv_heads)
    if sinks is not None:
        largest = largest.maximum(sinks)
    grid -= largest
    weights = scores.exp_()
    sums = weights.sum(-1, keepdim=True)
    weights = weights.to(values.dtype)
    total, out = sums[0], torch.bmm(weights[0], values[:, blocks[0]])
    if sinks is not None:
        total += (sinks - largest).exp().view_as(total)
    for index, block in enumerate(blocks[1:], start=1):
        total += sums[index]
        out += torch.bmm(weights[index], values[:, block])
    out = out / total.to(out.dtype)
    return out.view(batch, heads, queries, -1).transpose(1, 2)


def _by_row(sinks_H: Tensor, kv_heads: int) -> Tensor:
    """The sink of each row of the scores: float32 [K, G, 1, 1], which broadcasts to [B, K, G, Q, 1]."""
    return sinks_H.float().view(kv_heads, -1, 1, 1)


def _by_kv_head(query_BQHD: Tensor, kv_heads: int) -> Tensor:
    """[B * K, G * Q, D]: the queries that share keys become rows of one product."""
    batch, queries, heads, size = query_BQHD.shape
    return query_BQHD.transpose(1, 2).reshape(batch * kv_heads, heads // kv_heads * queries, size)
