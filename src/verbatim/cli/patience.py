"""Says on standard error what a command is doing, where that takes longer than a person waits without asking."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol


class Timer(Protocol):
    """A `threading.Timer`."""

    daemon: bool

    def start(self) -> None:
        """Call the function when the seconds are over."""

    def cancel(self) -> None:
        """Do not."""

    def join(self) -> None:
        """Wait for its thread."""


@contextlib.contextmanager
def told_if_slow(
    what: str, *, seconds: float = 3.0, timer: Callable[[float, Callable[[], None]], Timer] = threading.Timer
) -> Iterator[None]:
    """Print `what` where the block takes longer than `seconds`.

    Args:
        what: "importing torch".
        seconds: How long nothing is said.
        timer: For tests.
    """
    waiting = timer(seconds, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()  # no thread is left behind
