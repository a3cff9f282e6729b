"""Keeps freed memory in the process: the C library gives it back to the kernel, which clears its pages at the next use.

A step on a CPU makes and frees the same buffers in each layer and micro-batch. With glibc's own limits a tenth of a
small model's step went into pages that had been given back a moment before.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

MAPPED_FROM = 32 * 2**20
"""Bytes from which a buffer is mapped by itself and unmapped when it is freed: what glibc arrives at in time."""
KEPT = 2**30
"""Most bytes of freed memory at the end of the heap that are kept."""
PADDING = 64 * 2**20
"""Bytes by which a heap grows: that of a thread other than the first, which has parts of this size, keeps them too."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Raise glibc's limits for this process, once; whether that was done. Limits that the environment sets stay, and
    other C libraries have none of these."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(os.environ.get(name) for name in _SETTINGS):
        return False
    limits = ((_M_MMAP_THRESHOLD, MAPPED_FROM), (_M_TRIM_THRESHOLD, KEPT), (_M_TOP_PAD, PADDING))
    return all([mallopt(number, size) == 1 for number, size in limits])
