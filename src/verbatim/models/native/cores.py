"""Shares a machine's cores between the two sides of a run, sampler and trainer.

Two thread teams on the same cores slow each other down, so each side gets half of the cores while both compute. But one
side is idle for most of a step: the trainer if sampling takes longer, otherwise the sampler. So each side publishes in
a memory-mapped file whether it is computing. A side takes all cores for one pass once the other side has been idle for
as long as such a pass takes. A shorter wait would not be enough: many times in a step, a sampler is idle for 5 to 50 ms
because all its sequences wait for tools, and a trainer with passes of 200 ms would then still hold the cores long after
the sampler needs them again.
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
"""Assumed duration of a pass in seconds, until a pass has been measured."""


def own_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreShare:
    """One side's handle. Reading the other side's state takes no system call, so it can be done before every pass.

    Example: on four cores, a side gets two threads while the other side computes. A side whose passes take 0.2 s gets
        four threads once the other side has been idle for 0.2 s.

    Args:
        path: The file that both sides map; created if it does not exist.
        side: The side that uses this handle.
        cores: Number of cores that the run may use.

    Raises:
        OSError: the file cannot be created or mapped.
    """

    def __init__(self, path: Path, side: Side, cores: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, len(_PLACES) * _NUMBER)
            # One float64 per side: when it became idle (monotonic, a clock that all processes share), or _COMPUTES.

            self._idle_since = memoryview(mmap.mmap(file, len(_PLACES) * _NUMBER)).cast("d")
        finally:
            os.close(file)
        self._own = _PLACES[side]
        self._other = 1 - self._own
        self._cores = cores
        self._pass_seconds = FIRST_PASS
        self._began: float | None = None
        self._idle_since[self._own] = 0.0  # this side has not computed yet, so the other side may use its cores

    def compute(self, now: bool) -> None:
        """Publish that this side starts computing (`now` is True) or stops computing (`now` is False)."""
        if not now:
            self._began = None
            self._idle_since[self._own] = time.monotonic()
        elif self._idle_since[self._own] != _COMPUTES:
            self._idle_since[self._own] = _COMPUTES

    def threads_for_pass(self) -> int:
        """The number of threads for the pass that starts now, at least 1. The time until the next call counts as the
        duration of this pass."""
        now, since = time.monotonic(), self._idle_since[self._other]
        if self._began is not None:
            self._pass_seconds = now - self._began
        self._began = now
        is_free = since != _COMPUTES and now - since >= self._pass_seconds
        return self._cores if is_free else max(1, self._cores // 2)
