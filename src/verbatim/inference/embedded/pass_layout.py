"""Assigns the tokens of one forward pass to rows, and groups sequences whose attention is computed together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.core.types import Int32
from verbatim.inference.embedded.kv_cache import BLOCK, AttentionGroup, up_to
from verbatim.inference.embedded.slots import Slots

_QUANTUM = 16
"""In passes that are not deterministic, the number of keys is a multiple of this, so that shapes recur."""
_SHORTEST = 16
"""Minimum number of sequences in a range."""
_RANGE_BYTES = 1 << 20
"""Starting one more range takes as long as reading this many bytes of keys."""
_PAIRS = 1 << 16
"""Maximum number of (query, key) pairs in a group of several prompts whose attention is computed together. The scores
of this many pairs take 256 KB per head."""
_COPY = 3
"""Cost of copying keys and reading the copy, relative to reading them in place."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PassLayout:
    """The place of each token of a pass. The tokens of one slot are adjacent and in order."""

    rows: Rows
    """The row of each token: int64 [W]."""
    slots: Slots
    """The slot of each token: int64 [W]."""
    positions: Rows
    """The position of each token in its sequence: int64 [W]."""
    num_rows: int
    """Number of rows, including rows without a token."""

    def spread(self, values: Rows) -> Rows:
        """Put the tokens' values (int64 [W]) into the tokens' rows: int64 [num_rows], 0 elsewhere."""
        out = np.zeros(self.num_rows, dtype=np.int64)
        out[self.rows] = values
        return out


def fixed_groups(layout: PassLayout, num_single: int, device: torch.device) -> list[AttentionGroup]:
    """The groups of a deterministic pass: all slots, in place and in row order; then all prompt tokens, each with a
    copy of its slot's keys."""
    groups = []
    if num_single:
        positions = np.zeros(layout.num_rows, dtype=np.int64)
        positions[layout.rows[:num_single]] = layout.positions[:num_single]
        groups.append(group(slice(0, layout.num_rows), None, slice(0, layout.num_rows), positions, BLOCK, device))
    if num_single < len(layout.rows):
        rest = slice(num_single, None)
        groups.append(group(layout.rows[rest], None, layout.slots[rest], layout.positions[rest], BLOCK, device))
    return groups


def ragged_groups(
    layout: PassLayout,
    slots: Slots,
    counts: Rows,
    computed: Rows,
    *,
    bytes_per_key: int,
    device: torch.device,
    ids: Int32 | None = None,
) -> list[AttentionGroup]:
    """The groups of a pass that is not deterministic: ranges of slots with one new token each, then groups of prompts
    of similar length.

    Args:
        layout: The place of each token.
        slots: The slots of the pass, slots with one new token first: int64 [S].
        counts: Number of new tokens of each slot: int64 [S].
        computed: Number of cached tokens of each slot: int64 [S].
        bytes_per_key: Bytes of one position's keys and values in one layer.
        device: The model's device.
        ids: The ids of every slot, int32 [slots, context], if equal ids imply equal keys and values; otherwise None.
    """
    groups = []
    num_single = int((counts == 1).sum())
    single, lengths = slots[:num_single], layout.positions[:num_single] + 1
    for slot_range in slot_ranges(single, lengths, bytes_per_key):
        rows = slice(slot_range.first, slot_range.last)
        own, positions = single[rows], lengths[rows] - 1
        cells: Rows | None = None
        if slot_range.in_place and len(own) < slot_range.num_slots:  # idle slots may lie in between
            cells, spread = own - slot_range.slots.start, np.zeros(slot_range.num_slots, dtype=np.int64)
            spread[cells] = positions
            positions = spread
        made = group(rows, cells, slot_range.slots if slot_range.in_place else own, positions, _QUANTUM, device)
        shared = 0 if ids is None else shared_prefix(ids, own, int(lengths[rows].min()) - 1)
        groups.append(replace(made, prefix=shared, prefix_slot=int(own[0])) if shared else made)
    if num_single < len(slots):
        several, starts = counts[num_single:], (np.cumsum(counts) - counts)[num_single:]
        cached = computed[num_single:]
        on_cpu = device.type == "cpu"
        groups += [
            _prompt_group(slots[num_single:][of], starts[of], several[of], cached[of], device)
            for similar in _similar(several)
            for of in (at_once(similar, several, cached) if on_cpu else [similar])
        ]
    return groups


def shared_prefix(ids: Int32, slots: Slots, cached: int) -> int:
    """Length of the prefix that these slots share and that is read only once for all of them: 0 or, so that shapes
    recur, a multiple of `BLOCK`.

    Args:
        ids: The ids of every slot: int32 [slots, context].
        slots: The slots whose attention is computed together: int64 [B].
        cached: Number of cached tokens of the shortest of these sequences.

    Example: 16 sequences of 150 to 300 cached tokens, the first 140 of which are equal, share 128 tokens.
    """
    if len(slots) < _SHORTEST or cached < BLOCK:
        return 0
    equal = (ids[slots, :cached] == ids[slots[0], :cached]).all(axis=0)
    common = cached if equal.all() else int(equal.argmin())
    return common // BLOCK * BLOCK


@dataclass(frozen=True, kw_only=True)
class SlotRange:
    """Decoding sequences whose attention is computed together, padded to the longest sequence."""

    first: int
    """Index of the first sequence among the decoding sequences."""
    last: int
    """Index after the last sequence."""
    slots: slice
    """The slots from the first to the last sequence, including idle slots."""
    longest: int
    """Number of keys of the longest sequence."""

    @property
    def num_slots(self) -> int:
        """Number of slots that an in-place read covers."""
        return int(self.slots.stop - self.slots.start)

    @property
    def in_place(self) -> bool:
        """True if reading all slots in place, including idle slots, costs less than copying the sequences' slots."""
        return self.num_slots <= _COPY * (self.last - self.first)

    @property
    def keys(self) -> int:
        """Cost of reading the range, in units of one key read in place."""
        return min(self.num_slots, _COPY * (self.last - self.first)) * self.longest

    def joined(self, other: SlotRange) -> SlotRange:
        """This range merged with `other`, the range after it."""
        return SlotRange(
            first=self.first,
            last=other.last,
            slots=slice(self.slots.start, other.slots.stop),
            longest=max(self.longest, other.longest),
        )


def slot_ranges(slots: Slots, lengths: Rows, bytes_per_key: int) -> list[SlotRange]:
    """Split sequences into ranges of neighbouring slots, wherever a split saves more than an additional range costs.

    Args:
        slots: Slots of the sequences, ascending: int64 [B].
        lengths: Number of keys of each sequence: int64 [B].
        bytes_per_key: Bytes of one position's keys and values in one layer.

    Example:
        With 512 bytes per key, 16 sequences of 1000 keys followed by 48 sequences of 100 keys become two ranges, one of
        16 and one of 48 sequences.
    """
    done: list[SlotRange] = []
    for first in range(0, len(slots), _SHORTEST):
        last = min(first + _SHORTEST, len(slots))
        current = SlotRange(
            first=first,
            last=last,
            slots=slice(int(slots[first]), int(slots[last - 1]) + 1),
            longest=int(lengths[first:last].max()),
        )
        while done:
            joined = done[-1].joined(current)
            if (joined.keys - done[-1].keys - current.keys) * bytes_per_key > _RANGE_BYTES:
                break
            done.pop()
            current = joined
        done.append(current)
    return done


def _prompt_group(slots: Slots, starts: Rows, counts: Rows, computed: Rows, device: torch.device) -> AttentionGroup:
    """A group of sequences with similar numbers of new tokens, padded to the largest number."""
    longest, total = int(counts.max()), int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    sequence = np.repeat(np.arange(len(slots)), counts)
    positions = np.zeros((len(slots), longest), dtype=np.int64)
    positions[sequence, within] = computed[sequence] + within
    cells = sequence * longest + within
    return group(starts[sequence] + within, cells, slots, positions, _QUANTUM, device)


def _similar(counts: Rows) -> list[Slots]:
    """Indices of sequences by number of new tokens, one array per power of two: padding at most doubles a group."""
    kind = np.ceil(np.log2(counts)).astype(np.int64)
    return [np.flatnonzero(kind == k) for k in np.unique(kind)]


def at_once(similar: Slots, counts: Rows, computed: Rows) -> list[Slots]:
    """Split sequences into groups whose scores fit the CPU's cache: a group is one sequence, or several sequences with
    at most `_PAIRS` (query, key) pairs after padding.

    Args:
        similar: Indices of the sequences: int64 [N].
        counts: Number of new tokens of every sequence: int64 [S].
        computed: Number of cached tokens of every sequence: int64 [S].

    Returns:
        The indices of each run, shorter sequences first.

    Example: of three sequences with 100 new tokens each and 500, 100 and 200 keys, the two with fewer keys form a run.
        After padding these have 2 * 100 * 200 pairs, while all three would have 3 * 100 * 500.
    """
    done: list[Slots] = []
    ordered = similar[np.argsort((counts + computed)[similar], kind="stable")]
    first = 0
    for last in range(1, len(ordered) + 1):
        of = ordered[first : last + 1]
        if last == len(ordered) or len(of) * counts[of].max() * (counts + computed)[of].max() > _PAIRS:
            done.append(ordered[first:last])
            first = last
    return done


def group(
    rows: Rows | slice, cells: Rows | None, slots: Slots | slice, positions: Rows, quantum: int, device: torch.device
) -> AttentionGroup:
    """An `AttentionGroup`; `positions` is int64 [B] for one query per sequence, or [B, Q]."""
    return AttentionGroup(
        rows=rows if isinstance(rows, slice) else as_tensor(rows, device),
        cells=None if cells is None else as_tensor(cells, device),
        slots=slots if isinstance(slots, slice) else as_tensor(slots, device),
        positions_BQ=as_tensor(positions.reshape(len(positions), -1), device),
        num_keys=up_to(int(positions.max()) + 1, quantum),
    )


def as_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device; on a CPU it shares memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
