"""Ends a command: the first Ctrl-C or SIGTERM asks for its end, the second ends the process at once; so does a command
that is done, even where a grader or a tool left a thread behind."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from verbatim.cli import exit_status
from verbatim.core.texts import printable
from verbatim.core.user_code import raise_ctrl_c
from verbatim.rollouts.main_loop import Presses

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that other threads may take to end after the command has."""
_SIGNALS = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
"""The signals that end a command, by the names for people."""


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
            yield
            return
        cancelled_by: str | None = None

        def press(which: str) -> None:
            nonlocal cancelled_by
            if not first(loop):
                cancelled_by = which
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(main.cancel)

        try:
            with second_press_ends(press, farewell):
                yield
        except asyncio.CancelledError:
            if cancelled_by is not None:
                raise KeyboardInterrupt(cancelled_by) from None
            raise

    return presses


@contextlib.contextmanager
def second_press_ends(
    first: Callable[[str], None], farewell: Callable[[], str], handle_first: Callable[[str], None] = lambda which: None
) -> Iterator[None]:
    """While the block runs, the first Ctrl-C or SIGTERM is told, the second one ends the process at once.

    Args:
        first: Called on a thread at the first one, with its name, whatever the main thread does.
        farewell: What to write before the process ends at once.
        handle_first: Called in the main thread at the first one, as soon as that comes to Python code; may raise.
    """
    num_handled = 0

    def watch() -> None:
        num_presses = 0
        while number := os.read(reader, 1):
            if number[0] not in _SIGNALS:
                continue
            num_presses += 1
            if num_presses > 1:
                _end_at_once(farewell())
            first(_SIGNALS[number[0]])

    def handle(number: int, frame: object) -> None:
        """The second one is for C code that holds the interpreter, so that no thread runs, but looks for signals (`re`
        does)."""
        nonlocal num_handled
        num_handled += 1
        if num_handled > 1:
            _end_at_once(farewell())
        handle_first(_SIGNALS[number])

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python writes a signal's number there as it arrives.
    handlers = {number: signal.signal(number, handle) for number in _SIGNALS}
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="verbatim-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        watcher.join()
        os.close(reader)


def sigterm_is_ctrl_c() -> None:
    """Outside the blocks above SIGTERM counts as Ctrl-C too: what was started is ended, the status is 130. The second
    one ends the process at once. Where SIGTERM is ignored, it stays so."""
    num_handled = 0

    def handle(number: int, frame: object) -> None:
        nonlocal num_handled
        num_handled += 1
        if num_handled > 1:
            _end_at_once("")
        raise_ctrl_c(_SIGNALS[number])

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handle)


def _end_at_once(farewell: str) -> None:
    """No `finally` of anyone's runs: whoever asks twice does not want to wait for them. A cursor that a bar has hidden
    is shown again."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
        os.write(2, f"\n{printable(farewell)}\n".encode(errors="replace"))
    os._exit(exit_status.INTERRUPTED)


def end_without_stragglers(status: int) -> None:
    """Called when the command is done: from `PATIENCE` seconds on, threads that still run end with the process; at
    Ctrl-C or SIGTERM, at once, with the same status.

    Python itself waits for every thread that is not a daemon, without limit.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(status))
    threading.Thread(target=_end_stragglers, args=(status,), name="verbatim-leaving", daemon=True).start()


def ignore_signals_at_the_very_end() -> None:
    """Called when the process begins: while Python takes itself down, after all `atexit` functions, it has no handlers
    any more, and a signal would end a command that is done with the signal's status."""

    def ignore() -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)


def _end_stragglers(status: int) -> None:
    time.sleep(PATIENCE)
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon and t.is_alive()]
    if not left:
        return
    logger.warning(
        "the process ends, though %d threads that an environment or a tool started still run: %s",
        len(left),
        ", ".join(left[:5]),
    )
    with contextlib.suppress(Exception):  # others' functions, the last thing that runs
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
