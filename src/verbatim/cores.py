"""Shares the cores of a machine between the two sides of a run, sampler and trainer, while both are there.

Two teams of threads on the same cores wait for each other, so each side has its share while both compute. But the
trainer is idle for most of a step where sampling takes longer, and the sampler where training does. So each side says
when it computes, in a file that both map into memory, and a side that computes alone has all cores.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Literal

Side = Literal["sampler", "trainer"]
_PLACES: dict[Side, int] = {"sampler": 0, "trainer": 1}


def own_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreShare:
    """One side's view. Reading the other side takes no system call, so it may be asked before every pass.

    Example: on four cores a side has two threads while the other one computes, and four while it does not.

    Args:
        path: The same file for both; it is made where it does not exist.
        side: Whose view this is.
        cores: Cores of the machine that the run may use.

    Raises:
        OSError: the file cannot be made or mapped.
    """

    def __init__(self, path: Path, side: Side, cores: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, len(_PLACES))
            self._map = mmap.mmap(file, len(_PLACES))
        finally:
            os.close(file)
        self._own = _PLACES[side]
        self._other = 1 - self._own
        self._cores = cores
        self.compute(False)

    def compute(self, now: bool) -> None:
        """Say that this side begins to compute, or has ended."""
        self._map[self._own] = now

    @property
    def num_threads(self) -> int:
        """Threads that this side may have now, at least 1."""
        return max(1, self._cores // 2) if self._map[self._other] else self._cores
