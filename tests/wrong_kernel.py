"""A compiled kernel of the sampler that computes something else than its model."""

from __future__ import annotations

import ctypes
from typing import Any

from verbatim.inference.embedded.compiled.library import load_kernel


class WrongKernel:
    """A matrix is packed without its first number."""

    def __init__(self) -> None:
        self._kernel: Any = load_kernel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def verbatim_pack(self, source: int, rows: int, columns: int, to: int) -> None:
        self._kernel.verbatim_pack(source, rows, columns, to)
        ctypes.memset(to, 0, 4)
