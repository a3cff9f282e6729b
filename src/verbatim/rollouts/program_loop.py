"""Runs the event loop of a blocking call: on this thread, or on a new one where a loop is already running here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from verbatim.rollouts.main_loop import run_main
from verbatim.user_code import raise_ctrl_c

T = TypeVar("T")

Ask = Callable[[asyncio.AbstractEventLoop], bool]
"""Asks the work on this loop to end soon; False where it cannot. Called on any thread."""


def run_in_program(work: Coroutine[Any, Any, T], ask: Ask = lambda loop: False) -> T:
    """Run the coroutine in a script, a test or a notebook, and return its result.

    The first Ctrl-C calls `ask`, the second cancels the coroutine, the third raises KeyboardInterrupt where the code
    is. No handler of a signal is changed outside the main thread, or where the program has one of its own. Where an
    event loop is running in this thread (a notebook), the coroutine runs on a thread with a loop of its own.

    Raises:
        KeyboardInterrupt: Ctrl-C cancelled the coroutine.
        BaseException: what the coroutine raised.
    """
    presses = _Presses(ask)
    if asyncio._get_running_loop() is None:
        return run_main(work, presses.handled_here, ends_without_memory=True)
    return _on_own_thread(work, presses)


class _Presses:
    """Ctrl-C while a run's loop is at work."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._num = 0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._has_cancelled = False

    def press(self) -> None:
        """One Ctrl-C, on any thread."""
        self._num += 1
        if self._running is None:
            return
        loop, main = self._running
        if self._num == 1 and self._ask(loop):
            return
        self._cancel(loop, main)

    def _cancel(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
        self._has_cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(main.cancel)

    @contextlib.contextmanager
    def heard_elsewhere(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        """For `run_main`, where another thread hears of Ctrl-C."""
        self._running = (loop, main)
        try:
            if self._num:  # pressed before there was a loop
                self._cancel(loop, main)
            yield
        except asyncio.CancelledError:
            if self._has_cancelled:
                raise KeyboardInterrupt("Ctrl-C") from None
            raise
        finally:
            self._running = None

    @contextlib.contextmanager
    def handled_here(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        """For `run_main`, on the thread that hears of Ctrl-C."""
        is_main = threading.current_thread() is threading.main_thread()
        num_signals = 0

        def handle(number: int, frame: object) -> None:
            nonlocal num_signals
            num_signals += 1
            if num_signals > 2:
                raise_ctrl_c()
            # On a thread: the code that was interrupted may hold the lock of the console that `ask` prints on.
            threading.Thread(target=self.press, name="verbatim-signals", daemon=True).start()

        with self.heard_elsewhere(loop, main):
            if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                yield
                return
            signal.signal(signal.SIGINT, handle)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_own_thread(work: Coroutine[Any, Any, T], presses: _Presses) -> T:
    result: Future[T] = Future()

    def main() -> None:
        try:
            result.set_result(run_main(work, presses.heard_elsewhere, ends_without_memory=True))
        except BaseException as error:  # noqa: BLE001  carried to the caller
            result.set_exception(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(main,), name="verbatim-loop", daemon=True)
    thread.start()
    heard = told = 0
    with _ctrl_c_raises():
        while not result.done():
            try:
                while told < min(heard, 2):
                    told += 1
                    presses.press()
                thread.join()
            except KeyboardInterrupt:
                heard += 1
                if heard > 2:
                    raise
    return result.result()


@contextlib.contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """While this thread waits: under `asyncio.run` the first Ctrl-C only cancels a task of the loop that waits too."""
    handler = signal.getsignal(signal.SIGINT)
    of_asyncio = isinstance(handler, functools.partial) and (
        getattr(handler.func, "__func__", None) is asyncio.Runner._on_sigint  # type: ignore[attr-defined]
    )
    if not of_asyncio or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
