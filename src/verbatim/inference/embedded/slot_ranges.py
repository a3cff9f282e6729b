"""Groups slots by length for attention, so that short sequences are not padded to long ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SHORTEST = 16
"""Fewest slots of a range."""
_RANGE_BYTES = 1 << 20
"""Bytes of keys whose reading costs as much as one more range."""
_COPY = 3
"""Cost of copying keys and reading the copy, relative to reading them in place."""


@dataclass(frozen=True, kw_only=True)
class SlotRange:
    """Sequences that attend together, padded to the longest of them."""

    first: int
    """Index of the first among the decoding sequences."""
    last: int
    """Index after the last."""
    slots: slice
    """The slots from the first to the last, idle ones included."""
    longest: int
    """Keys of the longest sequence."""

    @property
    def num_slots(self) -> int:
        """Slots that an in-place read covers."""
        return int(self.slots.stop - self.slots.start)

    @property
    def in_place(self) -> bool:
        """Whether reading the idle slots too costs less than copying the others."""
        return self.num_slots <= _COPY * (self.last - self.first)

    @property
    def keys(self) -> int:
        """Cost of reading the range, in keys read in place."""
        return min(self.num_slots, _COPY * (self.last - self.first)) * self.longest

    def joined(self, other: SlotRange) -> SlotRange:
        """This range joined with the next one."""
        return SlotRange(first=self.first, last=other.last, slots=slice(self.slots.start, other.slots.stop),
                   longest=max(self.longest, other.longest))  # fmt: skip


def slot_ranges(slots: NDArray[np.intp], lengths: NDArray[np.int64], bytes_per_key: int) -> list[SlotRange]:
    """Cut sequences into ranges of neighbouring slots, where the saving exceeds the cost of one more range.

    Args:
        slots: Slots of the sequences, ascending: int64 [B].
        lengths: Keys of each: int64 [B].
        bytes_per_key: Bytes of one key and its value in one layer.

    Example:
        16 sequences of 1000 keys before 48 of 100, at 512 bytes: two ranges, of 16 and 48.
    """
    done: list[SlotRange] = []
    for first in range(0, len(slots), _SHORTEST):
        last = min(first + _SHORTEST, len(slots))
        current = SlotRange(first=first, last=last, slots=slice(int(slots[first]), int(slots[last - 1]) + 1),
                  longest=int(lengths[first:last].max()))  # fmt: skip
        while done:
            joined = done[-1].joined(current)
            if (joined.keys - done[-1].keys - current.keys) * bytes_per_key > _RANGE_BYTES:
                break
            done.pop()
            current = joined
        done.append(current)
    return done
