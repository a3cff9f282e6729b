"""Reserves standard output for machine-readable lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Give standard output to the caller alone while the block runs: everything that environments, libraries and child
    processes print goes to standard error. If the reader is gone at the end, the rest of the output is dropped."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)  # this works on the descriptor, because child processes and C code do not use `sys.stdout`
    stdout = os.fdopen(os.dup(before), "w", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield stdout
    finally:
        with contextlib.suppress(BrokenPipeError):
            stdout.close()
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)
