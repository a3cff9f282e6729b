"""Ctrl-C and SIGTERM while a command runs: the first asks it to end, the second ends the process at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from verbatim.cli import exit_status
from verbatim.rollouts.main_loop import Presses, cancel_then_raise
from verbatim.texts import printable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def two_presses(
    first: Callable[[asyncio.AbstractEventLoop], bool] = lambda loop: False, farewell: Callable[[], str] = lambda: ""
) -> Presses:
    """For `run_main`.

    A thread hears of the signals, not the event loop, so the second one ends the process also where a user's code
    blocks the loop, or catches everything that is raised.

    Args:
        first: Called on that thread at the first press; whether it asked for the end. Otherwise the main task is
            cancelled.
        farewell: What to write before the process ends at once.
    """

    @contextlib.contextmanager
    def presses(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            with cancel_then_raise(loop, main):
                yield
            return
        cancelled, num_handled = False, 0

        def watch() -> None:
            nonlocal cancelled
            num_presses = 0
            while number := os.read(reader, 1):
                if number[0] not in _SIGNALS:
                    continue
                num_presses += 1
                if num_presses > 1:
                    _end_at_once(farewell())
                if not first(loop):
                    cancelled = True
                    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                        loop.call_soon_threadsafe(main.cancel)

        def handle(number: int, frame: object) -> None:
            """For C code that holds the interpreter, so that no thread runs, but looks for signals (`re` does)."""
            nonlocal num_handled
            num_handled += 1
            if num_handled > 1:
                _end_at_once(farewell())

        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python writes a signal's number there as it arrives.
        handlers = {number: signal.signal(number, handle) for number in _SIGNALS}
        fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=watch, name="verbatim-signals", daemon=True)
        watcher.start()
        try:
            yield
        except asyncio.CancelledError:
            if cancelled:
                raise KeyboardInterrupt from None
            raise
        finally:
            signal.set_wakeup_fd(fd_before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)
            watcher.join()
            os.close(reader)

    return presses


def _end_at_once(farewell: str) -> None:
    """No `finally` of anyone's runs: whoever asks twice does not want to wait for them."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{printable(farewell)}\n".encode(errors="replace"))
    os._exit(exit_status.INTERRUPTED)
