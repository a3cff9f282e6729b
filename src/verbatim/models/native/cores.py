"""Shares the cores of a machine between the two sides of a run, sampler and trainer, while both are there.

Two teams of threads on the same cores wait for each other, so each side has its share while both compute. But the
trainer is idle for most of a step where sampling takes longer, and the sampler where training does. So each side says
when it computes, in a file that both map into memory, and a side takes the cores of one that has been idle for as long
as it would keep them: for one pass. A sampler is idle for 5 to 50 ms many times in a step, while all its sequences wait
for their tools; a trainer whose passes take 200 ms would have the cores long after they are needed again.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Literal

Side = Literal["sampler", "trainer"]
_PLACES: dict[Side, int] = {"sampler": 0, "trainer": 1}
_COMPUTES = -1.0
_NUMBER = 8
"""Bytes of a float64."""

FIRST_PASS = 0.1
"""Seconds that a pass is taken to last before one was measured."""


def own_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreShare:
    """One side's view. Reading the other side takes no system call, so it may be asked before every pass.

    Example: on four cores a side has two threads while the other one computes. Its passes take 0.2 s; once the other
    one was idle for 0.2 s, it has four.

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
            os.ftruncate(file, len(_PLACES) * _NUMBER)
            # Each side's place: since when it is idle, on the clock that all processes share; or that it computes.
            self._idle_since = memoryview(mmap.mmap(file, len(_PLACES) * _NUMBER)).cast("d")
        finally:
            os.close(file)
        self._own = _PLACES[side]
        self._other = 1 - self._own
        self._cores = cores
        self._pass_seconds = FIRST_PASS
        self._began: float | None = None
        self._idle_since[self._own] = 0.0  # it has not computed yet: its cores are free

    def compute(self, now: bool) -> None:
        """Say that this side begins to compute, or has ended."""
        if not now:
            self._began = None
            self._idle_since[self._own] = time.monotonic()
        elif self._idle_since[self._own] != _COMPUTES:
            self._idle_since[self._own] = _COMPUTES

    def threads_for_pass(self) -> int:
        """Threads that this side may have for the pass that begins now, at least 1. A pass lasts until the next one."""
        now, since = time.monotonic(), self._idle_since[self._other]
        if self._began is not None:
            self._pass_seconds = now - self._began
        self._began = now
        is_free = since != _COMPUTES and now - since >= self._pass_seconds
        return self._cores if is_free else max(1, self._cores // 2)
