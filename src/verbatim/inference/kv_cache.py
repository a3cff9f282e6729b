"""Keys and values of every sequence in blocks of fixed size, and the attention plan that reads and writes them.

Legend: T rows of one flat forward pass, H query heads, K key/value heads, G = H / K, D head size, S slots,
N blocks, C keys of a block, B sequences of a group, Q queries of each.

All blocks of a sequence are scored at once and combined in order. A masked key has the probability exp(-inf) = 0
exactly, so blocks that a sequence does not reach add exact zeros: its output does not depend on how long the
other sequences are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 64
"""Keys of one block."""


@dataclass(frozen=True, kw_only=True)
class KeyValueShape:
    """What one token's keys and values look like, the same in every layer."""

    num_layers: int
    """Attention layers."""
    num_kv_heads: int
    """K."""
    key_size: int
    """D of keys (and queries)."""
    value_size: int
    """D of values."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Memory of one token in all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize


class KeyValueCache:
    """Keys [layers, N, S, K, D, C] and values [layers, N, S, K, C, D], grown when a longer sequence comes.

    The block dimension is before the slot dimension: the first blocks of all slots are one contiguous piece that a
    batched matrix product takes without a copy.
    """

    def __init__(self, shape: KeyValueShape, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.num_slots = num_slots
        head = (shape.num_layers, 0, num_slots, shape.num_kv_heads)
        self.keys = torch.empty(*head, shape.key_size, BLOCK, dtype=dtype, device=device)
        self.values = torch.empty(*head, BLOCK, shape.value_size, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that each slot can hold now."""
        return self.keys.shape[1] * BLOCK

    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of this many tokens; at least doubles, so that growing costs O(1) per token."""
        if num_tokens > self.capacity:
            blocks = max(blocks_of(num_tokens), 2 * self.keys.shape[1])
            self.keys = _grown(self.keys, blocks)
            self.values = _grown(self.values, blocks)

    def copy_prefix(self, source: KeyValueCache, source_slot: int, slot: int, num_tokens: int) -> None:
        """Take over the first tokens of a slot of this or another cache (whole blocks are copied)."""
        self.reserve(num_tokens)
        blocks = blocks_of(num_tokens)
        self.keys[:, :blocks, slot] = source.keys[:, :blocks, source_slot]
        self.values[:, :blocks, slot] = source.values[:, :blocks, source_slot]

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.keys, self.values = self.keys[:, :0].clone(), self.values[:, :0].clone()

    def clear(self, slot: int) -> None:
        """Zero a slot whose contents are not finite."""
        self.keys[:, :, slot] = 0
        self.values[:, :, slot] = 0


def blocks_of(num_tokens: int) -> int:
    """Blocks that hold this many tokens.

    >>> blocks_of(64), blocks_of(65)
    (1, 2)
    """
    return -(-num_tokens // BLOCK)


def _grown(old: Tensor, num_blocks: int) -> Tensor:
    # Zeros and not `empty`: a masked key has weight 0, and 0 * NaN would be NaN.
    new = old.new_zeros(old.shape[0], num_blocks, *old.shape[2:])
    new[:, : old.shape[1]] = old
    return new


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Sequences that are attended to together: B sequences with Q queries each, padded."""

    rows: Tensor | None
    """Rows of the pass that are queries: int64 [R]; None = all of them, in the order of the cells."""
    cells: Tensor | None
    """Where each goes in the [B, Q] grid, flat: int64 [R]; None = in order, without padding."""
    slots_B: Tensor | None
    """The slot of each sequence: int64 [B]; None = all slots of the cache in order (no copy of the keys)."""
    positions_BQ: Tensor
    """Of each query: int64 [B, Q]; 0 in the padding."""
    num_blocks: int
    """N: reaches the last position."""


@dataclass(kw_only=True, eq=False)
class CachePlan:
    """One pass over tokens of many sequences: write their keys and values, attend to what each slot holds."""

    cache: KeyValueCache
    """Read and written in place."""
    write_rows: Tensor | None
    """Rows that are real tokens: int64 [W]; None = all."""
    write_slots: Tensor
    """Their slots: int64 [W]."""
    write_positions: Tensor
    """Their positions: int64 [W]."""
    groups: Sequence[Group]
    """Together they cover every row whose output matters."""
    _biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, scale: float,
        sliding_window: int | None,
    ) -> Tensor:  # fmt: skip
        """The attention output, [1, T, H, D]."""
        self._write(layer_index, key_BKTD[0].transpose(0, 1), value_BKTD[0].transpose(0, 1))
        query_THD = query_BHTD[0].transpose(0, 1) * scale
        out: Tensor | None = None
        for index, group in enumerate(self.groups):
            bias = self._bias(index, sliding_window)
            if group.rows is None:
                return self._attend_group(layer_index, group, query_THD, bias)[None]
            if out is None:
                out = query_THD.new_zeros(*query_THD.shape[:2], self.cache.shape.value_size)
            out[group.rows] = self._attend_group(layer_index, group, query_THD[group.rows], bias)
        assert out is not None
        return out[None]

    def _write(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> None:
        if self.write_rows is not None:
            key_TKD, value_TKD = key_TKD[self.write_rows], value_TKD[self.write_rows]
        block, offset = self.write_positions // BLOCK, self.write_positions % BLOCK
        self.cache.keys[layer][block, self.write_slots, :, :, offset] = key_TKD
        self.cache.values[layer][block, self.write_slots, :, offset] = value_TKD

    def _bias(self, index: int, sliding_window: int | None) -> Tensor:
        """0 where a query may look, -inf elsewhere: float [N, B, 1, 1, Q, C]; shared by all layers of a window."""
        if (index, sliding_window) not in self._biases:
            group = self.groups[index]
            positions = group.positions_BQ[None, :, None, None, :, None]
            keys = torch.arange(group.num_blocks * BLOCK, device=positions.device)
            keys = keys.view(group.num_blocks, 1, 1, 1, 1, BLOCK)
            hidden = keys > positions
            if sliding_window is not None:
                hidden |= keys <= positions - sliding_window
            bias = torch.zeros(hidden.shape, dtype=self.cache.keys.dtype, device=positions.device)
            self._biases[index, sliding_window] = bias.masked_fill_(hidden, -torch.inf)
        return self._biases[index, sliding_window]

    def _attend_group(self, layer: int, group: Group, query_RHD: Tensor, bias: Tensor) -> Tensor:
        batch, queries = group.positions_BQ.shape
        if group.cells is not None:
            padded = query_RHD.new_zeros(batch * queries, *query_RHD.shape[1:])
            padded[group.cells] = query_RHD
            query_RHD = padded
        keys, values = self.cache.keys[layer, : group.num_blocks], self.cache.values[layer, : group.num_blocks]
        if group.slots_B is not None:
            keys, values = keys.index_select(1, group.slots_B), values.index_select(1, group.slots_B)
        out = attend_blocks(query_RHD.reshape(batch, queries, *query_RHD.shape[1:]), keys, values, bias).flatten(0, 1)
        return out if group.cells is None else out[group.cells]


def attend_blocks(query_BQHD: Tensor, keys_NBKDC: Tensor, values_NBKCD: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention over N blocks of keys, with queries already scaled: [B, Q, H, D].

    Blocks are combined one after the other, so that trailing blocks that are wholly masked leave every bit as it is.

    Args:
        query_BQHD: H is a multiple of K; query heads of one key/value head are neighbours.
        keys_NBKDC: keys, head size before the key's place in its block.
        values_NBKCD: values.
        bias: 0 or -inf, broadcast to [N, B, K, G, Q, C]; every query sees at least one key.
    """
    batch, queries, heads, size = query_BQHD.shape
    blocks, _, kv_heads, _, _ = keys_NBKDC.shape
    share = heads // kv_heads
    query = query_BQHD.view(batch, queries, kv_heads, share, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(1, batch * kv_heads, share * queries, size).expand(blocks, -1, -1, -1)
    flat = blocks * batch * kv_heads
    scores = torch.bmm(query.reshape(flat, share * queries, size), keys_NBKDC.reshape(flat, size, BLOCK)).float()
    scores_NBKGQC = scores.view(blocks, batch, kv_heads, share, queries, BLOCK)
    scores_NBKGQC += bias
    scores_NBKGQC -= scores_NBKGQC.amax((0, -1), keepdim=True)
    weights_NBKGQC = scores_NBKGQC.exp_()
    sums = weights_NBKGQC.sum(-1)
    weighted = torch.bmm(
        weights_NBKGQC.view(flat, share * queries, BLOCK).to(values_NBKCD.dtype), values_NBKCD.reshape(flat, BLOCK, -1)
    ).view(blocks, batch, kv_heads, share, queries, -1)
    total, out = sums[0], weighted[0]
    for block in range(1, blocks):
        total += sums[block]
        out += weighted[block]
    out = out / total[..., None].to(out.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, -1)
