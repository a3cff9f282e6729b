"""Whether an exception says that memory was not enough: numpy, torch on a CPU and torch on a GPU have one each."""

from __future__ import annotations

import torch

_SAID = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work would have gone well.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)
