"""Keeps standard output for what a program reads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Standard output for this caller alone, while the block runs: what environments, libraries and child processes
    print there goes to standard error. What cannot be written at the end, because the reader has gone, is dropped."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
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
