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
    print there goes to standard error."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(before), "w", encoding="utf-8") as stdout, contextlib.redirect_stdout(sys.stderr):
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)
