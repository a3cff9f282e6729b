"""Prints on standard error what a command is doing, if the command takes long enough for a person to wonder."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol


class Timer(Protocol):
    """The interface of `threading.Timer`."""

    daemon: bool

    def start(self) -> None:
        """Start the countdown, after which the function is called."""

    def cancel(self) -> None:
        """Stop the countdown, so that the function is not called."""

    def join(self) -> None:
        """Wait for the timer's thread."""


@contextlib.contextmanager
def told_if_slow(
    what: str, *, seconds: float = 3.0, timer: Callable[[float, Callable[[], None]], Timer] = threading.Timer
) -> Iterator[None]:
    """Print `what` if the block takes longer than `seconds`.

    Args:
        what: What the command is doing, such as "importing torch".
        seconds: Time in seconds before `what` is printed.
        timer: Makes the timer; tests replace it.
    """
    waiting = timer(seconds, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()  # the thread must be gone, because a fork may follow
