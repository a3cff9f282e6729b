"""Loads the kernel's functions."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Literal

from verbatim.models.native import Build, CSource, build

SOURCE = CSource.read(Path(__file__).with_name("kernel.c"))


def load_kernel() -> ctypes.CDLL | None:
    """The kernel's functions, or None if it cannot be compiled. The first call on a machine takes seconds."""
    kernel = kernel_build().functions
    if kernel is None:
        return None
    # Without declared argument types, ctypes would pass addresses as 32-bit integers.
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("forward", None, (pointer, pointer, pointer)),
        ("workspace", number, (pointer, number, number)),
        ("packed", number, (number, number)),
        ("pack", None, (pointer, number, number, pointer)),
        ("pack_halves", None, (pointer, number, number, pointer)),
        ("logits", None, (pointer,)),
        ("draw", None, (pointer,)),
        ("rounds", number, ()),
        ("tiles", number, ()),
        ("product_of_halves", None, (*(pointer,) * 3, *(number,) * 3, *(pointer,) * 2)),
    ):
        function = getattr(kernel, f"verbatim_{name}")
        function.restype, function.argtypes = result, arguments
    return kernel


def bfloat16_path(kernel: Any) -> Literal["amx", "avx512_bf16", "float32"]:
    """What the loaded kernel multiplies a bfloat16 model's matrices with: AMX, which also computes attention over keys
    and values in bfloat16; AVX512-BF16; or, after widening the weights, float32."""
    return "amx" if kernel.verbatim_tiles() else "avx512_bf16" if kernel.verbatim_rounds() else "float32"


def kernel_build() -> Build:
    """The result of building the kernel on this machine."""
    return build(SOURCE)
