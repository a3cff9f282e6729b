"""Which slots to attend to together, so that short sequences do not pay for long ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RUN = 16
"""Slots of the shortest run."""
_RUN_BYTES = 1 << 20
"""A run of its own costs about as much as reading so many bytes of keys."""
_COPY = 3
"""Copying keys and reading the copy costs so much more than reading them in place."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Sequences that are attended to together, padded to the longest of them."""

    first: int
    """Index of the first among the decoding sequences."""
    last: int
    """Index behind the last."""
    slots: slice
    """The slots from the first to the last, idle ones included."""
    longest: int
    """Keys of the longest."""

    @property
    def num_slots(self) -> int:
        """Slots that are read if they are read in place."""
        return int(self.slots.stop - self.slots.start)

    @property
    def in_place(self) -> bool:
        """Whether reading idle slots along costs less than copying the others."""
        return self.num_slots <= _COPY * (self.last - self.first)

    @property
    def keys(self) -> int:
        """Keys that are read, or what reading them costs."""
        return min(self.num_slots, _COPY * (self.last - self.first)) * self.longest

    def joined(self, other: Run) -> Run:
        """This run and the next one as one."""
        return Run(first=self.first, last=other.last, slots=slice(self.slots.start, other.slots.stop),
                   longest=max(self.longest, other.longest))  # fmt: skip


def runs_of_slots(slots: NDArray[np.intp], lengths: NDArray[np.int64], bytes_per_key: int) -> list[Run]:
    """Cut sequences into runs of neighbouring slots, where what that saves is more than what a run costs.

    Args:
        slots: of the sequences, ascending: [B].
        lengths: keys of each: [B].
        bytes_per_key: of one key and its value, in one layer.

    Example:
        16 sequences of 1000 keys before 48 of 100, at 512 bytes: two runs, of 16 and 48.
    """
    done: list[Run] = []
    for first in range(0, len(slots), _RUN):
        last = min(first + _RUN, len(slots))
        run = Run(first=first, last=last, slots=slice(int(slots[first]), int(slots[last - 1]) + 1),
                  longest=int(lengths[first:last].max()))  # fmt: skip
        while done:
            joined = done[-1].joined(run)
            if (joined.keys - done[-1].keys - run.keys) * bytes_per_key > _RUN_BYTES:
                break
            done.pop()
            run = joined
        done.append(run)
    return done
