"""Lays the tokens of one forward pass out in rows, and groups those that attend together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.inference.embedded.kv_cache import BLOCK, Group, up_to
from verbatim.inference.embedded.slot_ranges import slot_ranges
from verbatim.inference.embedded.slots import Slots

_QUANTUM = 16
"""Passes that are not deterministic attend to a multiple of this many keys."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PassLayout:
    """Where the tokens of a pass go. The tokens of one slot are adjacent and in order."""

    rows: Rows
    """The row of each token: int64 [W]."""
    slots: Slots
    """The slot of each token: int64 [W]."""
    positions: Rows
    """The position of each token in its sequence: int64 [W]."""
    num_rows: int
    """Rows of the pass, those without a token included."""

    def spread(self, values: Rows) -> Rows:
        """Values of the tokens (int64 [W]) at their rows: int64 [num_rows], 0 elsewhere."""
        out = np.zeros(self.num_rows, dtype=np.int64)
        out[self.rows] = values
        return out


def fixed_groups(layout: PassLayout, num_single: int, device: torch.device) -> list[Group]:
    """A deterministic pass: all slots in place, in row order; then each prompt token with a copy of its slot's keys."""
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
    layout: PassLayout, slots: Slots, counts: Rows, computed: Rows, *, bytes_per_key: int, device: torch.device
) -> list[Group]:
    """Any other pass: ranges of slots with one new token each, then sequences with several, by similar numbers.

    Args:
        layout: Where the tokens are.
        slots: Slots in this pass, those with one token first: int64 [S].
        counts: New tokens of each: int64 [S].
        computed: Cached tokens of each: int64 [S].
        bytes_per_key: Bytes of one position's keys and values in one layer.
        device: Device of the model.
    """
    groups = []
    num_single = int((counts == 1).sum())
    single, lengths = slots[:num_single], layout.positions[:num_single] + 1
    for slot_range in slot_ranges(single, lengths, bytes_per_key):
        rows, positions = slice(slot_range.first, slot_range.last), lengths[slot_range.first : slot_range.last] - 1
        own = single[rows]
        if slot_range.in_place and len(own) == slot_range.num_slots:
            groups.append(group(rows, None, slot_range.slots, positions, _QUANTUM, device))
        elif slot_range.in_place:
            cells, spread = own - slot_range.slots.start, np.zeros(slot_range.num_slots, dtype=np.int64)
            spread[cells] = positions
            groups.append(group(rows, cells, slot_range.slots, spread, _QUANTUM, device))
        else:
            groups.append(group(rows, None, own, positions, _QUANTUM, device))
    if num_single < len(slots):
        several, starts = counts[num_single:], (np.cumsum(counts) - counts)[num_single:]
        cached = computed[num_single:]
        groups += [
            _prompt_group(slots[num_single:][of], starts[of], several[of], cached[of], device)
            for of in _similar(several)
        ]
    return groups


def _prompt_group(slots: Slots, starts: Rows, counts: Rows, computed: Rows, device: torch.device) -> Group:
    """Sequences with similar numbers of new tokens, padded to the longest."""
    longest, total = int(counts.max()), int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    sequence = np.repeat(np.arange(len(slots)), counts)
    positions = np.zeros((len(slots), longest), dtype=np.int64)
    positions[sequence, within] = computed[sequence] + within
    cells = sequence * longest + within
    return group(starts[sequence] + within, cells, slots, positions, _QUANTUM, device)


def _similar(counts: Rows) -> list[Slots]:
    """Indices of sequences whose numbers of new tokens lie between the same two powers of two."""
    kind = np.ceil(np.log2(counts)).astype(np.int64)
    return [np.flatnonzero(kind == k) for k in np.unique(kind)]


def group(
    rows: Rows | slice, cells: Rows | None, slots: Slots | slice, positions: Rows, quantum: int, device: torch.device
) -> Group:
    """Queries that attend together; `positions` is int64 [B] for one query each, or [B, Q]."""
    return Group(
        rows=rows if isinstance(rows, slice) else as_tensor(rows, device),
        cells=None if cells is None else as_tensor(cells, device),
        slots=slots if isinstance(slots, slice) else as_tensor(slots, device),
        positions_BQ=as_tensor(positions.reshape(len(positions), -1), device),
        num_keys=up_to(int(positions.max()) + 1, quantum),
    )


def as_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device; on a CPU it shares memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
