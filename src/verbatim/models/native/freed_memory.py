"""Makes glibc keep freed memory in the process instead of returning it to the kernel.

A step on a CPU allocates and frees the same buffers in each layer and micro-batch. The kernel has to zero returned
memory page by page before it is used again. With glibc's defaults, this took a tenth of a small model's step.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

MAPPED_FROM = 32 * 2**20
"""Size in bytes from which a buffer gets its own mapping, which is unmapped when the buffer is freed. The value is the
maximum of glibc's dynamic threshold. It is set explicitly, because setting the other limits turns the dynamic threshold
off."""
KEPT = 2**30
"""Maximum amount of freed memory, in bytes, that is kept at the end of the heap."""
PADDING = 64 * 2**20
"""Number of bytes by which a heap grows. The heap of any thread but the first consists of parts of this size. Because
the parts are so large, such a heap keeps freed memory too."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Raise glibc's limits for this process, once. Returns True if they were raised.

    The limits are left alone if environment variables set them, or if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(os.environ.get(name) for name in _SETTINGS):
        return False
    limits = ((_M_MMAP_THRESHOLD, MAPPED_FROM), (_M_TRIM_THRESHOLD, KEPT), (_M_TOP_PAD, PADDING))
    return all([mallopt(number, size) == 1 for number, size in limits])
