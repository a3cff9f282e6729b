"""Handles Ctrl-C and SIGTERM: every signal handler that the project installs is in this module.

```
CtrlC             Ctrl-C while an event loop runs its main task: in a program, a notebook or a command
two_presses       for a command: the first Ctrl-C asks it to end, the second ends the process at once, even if blocked
is_ctrl_c         True for a KeyboardInterrupt that the keyboard caused, not a user's `raise KeyboardInterrupt`
users_errors      converts everything that a user's code raises into one error, but lets Ctrl-C through
other functions   for processes that leave signals to another process, and for the start and end of a command
```

`inference.vllm.subreaper` runs with the standard library alone and handles its signals itself.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeAlias

from verbatim.core.texts import printable

INTERRUPTED = 130
"""Exit status of a process that was ended by Ctrl-C or SIGTERM (128 + SIGINT)."""
_SIGNALS = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
"""The signals that ask a process to end, with their names in messages."""

Ask: TypeAlias = Callable[[asyncio.AbstractEventLoop], bool]
"""A function that asks the work on this loop to end soon; it returns False if the work cannot be asked. Called on any
thread."""

Presses: TypeAlias = Callable[[asyncio.AbstractEventLoop, "asyncio.Task[Any]"], AbstractContextManager[None]]
"""Context manager that handles Ctrl-C while a loop runs its main task."""

_Handler: TypeAlias = Callable[[int, object], None]


def raise_ctrl_c(which: str = "Ctrl-C") -> NoReturn:
    """Called by our handlers of SIGINT and SIGTERM; `is_ctrl_c` recognises this function's frame in the traceback."""
    raise KeyboardInterrupt(which)


def is_ctrl_c(error: BaseException) -> bool:
    """True if a KeyboardInterrupt comes from the keyboard, not from `raise KeyboardInterrupt` in the user's code.

    Only the main thread gets signals, and an exception raised by a Python handler has the handler's frame in its
    traceback. Python's default handler has no frame; under the default handler, every KeyboardInterrupt counts as
    Ctrl-C.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        return True
    codes = {raise_ctrl_c.__code__, _code(handler)}
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code not in codes:
        at = at.tb_next
    return at is not None


@contextlib.contextmanager
def users_errors(told: Callable[[BaseException], Exception], *passed: type[BaseException]) -> Iterator[None]:
    """Convert any exception that a user's code raises in the block (including the `SystemExit` of `sys.exit`) into the
    error that `told` returns for it. Ctrl-C and exceptions of the classes `passed` are raised unchanged."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, passed) or is_ctrl_c(error):
            raise
        raise told(error) from error


def _code(handler: object) -> CodeType | None:
    function = handler.func if isinstance(handler, functools.partial) else handler
    return getattr(function, "__code__", None)


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C has been pressed since the block began. Needed under `asyncio.run`,
    whose handler cancels the main task: a tool's code may also cancel the main task, so a cancellation alone does not
    prove Ctrl-C. The handler of `asyncio.run` still runs."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _is_of_asyncio(handler):
        yield lambda: False
        return
    num_heard = 0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal num_heard
        num_heard += 1
        assert callable(handler)
        handler(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: num_heard > 0
    finally:
        if signal.getsignal(signal.SIGINT) is hear:
            signal.signal(signal.SIGINT, handler)


def _is_of_asyncio(handler: object) -> bool:
    """True if this handler is the handler that `asyncio.run` installs for Ctrl-C."""
    function = handler.func if isinstance(handler, functools.partial) else handler
    return isinstance(getattr(function, "__self__", None), asyncio.Runner)


@contextlib.contextmanager
def _handling(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    """Install handlers while the block runs. Does nothing outside the main thread, which cannot set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class CtrlC:
    """Handles Ctrl-C while a loop runs its main task. The first press calls `ask`, which may be unable to end the work;
    the next press cancels the main task, and the cancellation is raised as KeyboardInterrupt."""

    def __init__(self, ask: Ask = lambda loop: False) -> None:
        self._ask = ask
        self._num = self._num_signals = 0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled_by: str | None = None

    def press(self, which: str = "Ctrl-C") -> None:
        """Handle one press; called on any thread."""
        self._num += 1
        if self._running is None:
            return
        loop, main = self._running
        if self._num == 1 and self._ask(loop):
            return
        self._cancel(which, loop, main)

    def _cancel(self, which: str, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
        self._cancelled_by = which
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(main.cancel)

    def hear(self, number: int = signal.SIGINT, frame: object = None) -> None:
        """Handle one signal in the main thread; the third signal raises KeyboardInterrupt immediately, wherever the
        code is."""
        self._num_signals += 1
        if self._num_signals > 2:
            raise_ctrl_c()
        # `press` runs on a thread: the interrupted code may hold the lock of the console on which `ask` prints.
        threading.Thread(target=self.press, name="verbatim-signals", daemon=True).start()

    def handled(self) -> AbstractContextManager[None]:
        """Handle SIGINT while the block runs. Has no effect outside the main thread, or if the program has installed
        its own handler. The handler of `asyncio.run` is replaced, because that handler would not cancel the block but
        only a task that waits for the block."""
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler or _is_of_asyncio(handler):
            return _handling({signal.SIGINT: self.hear})
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def heard_elsewhere(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        """The context manager for `run_main` if other code receives the signals and calls `press` or `hear`."""
        self._running = (loop, main)
        try:
            if self._num:  # Ctrl-C was pressed before the loop existed
                self._cancel("Ctrl-C", loop, main)
            yield
        except asyncio.CancelledError:
            if self._cancelled_by is not None:
                raise KeyboardInterrupt(self._cancelled_by) from None
            raise
        finally:
            self._running = None

    @contextlib.contextmanager
    def handled_here(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        """The context manager for `run_main` on the main thread, where Python delivers signals; it also installs `hear`
        as the handler."""
        with self.heard_elsewhere(loop, main), self.handled():
            yield


def two_presses(ask: Ask = lambda loop: False, farewell: Callable[[], str] = lambda: "") -> Presses:
    """Handles signals for `run_main` in a command.

    A thread waits for the signals, not the event loop, so the second press ends the process even if a user's code
    blocks the loop or catches every exception.

    Args:
        ask: Called on the thread that waits for signals, at the first press; returns True if it could ask the work to
            end. If it returns False, the main task is cancelled.
        farewell: Returns the text to print before the process ends at once.
    """

    @contextlib.contextmanager
    def presses(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        ctrl_c = CtrlC(ask)
        with ctrl_c.heard_elsewhere(loop, main), second_press_ends(ctrl_c.press, farewell):
            yield

    return presses


@contextlib.contextmanager
def second_press_ends(
    first: Callable[[str], None], farewell: Callable[[], str], handle_first: Callable[[str], None] = lambda which: None
) -> Iterator[None]:
    """While the block runs, report the first Ctrl-C or SIGTERM, and end the process immediately at the second. Does
    nothing outside the main thread.

    Args:
        first: Called with the signal's name at the first signal, on a separate thread, even while the main thread is
            blocked.
        farewell: Returns the text to print before the process ends immediately. handle_first: Called with the signal's
            name at the first signal, in the main thread, as soon as the main thread runs Python code; may raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def watch() -> None:
        num_presses = 0
        while number := os.read(reader, 1):
            if number[0] not in _SIGNALS:
                continue
            num_presses += 1
            if num_presses > 1:
                _end_at_once(farewell())
            first(_SIGNALS[number[0]])

    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # required by set_wakeup_fd
    # Both a thread and a handler count signals: C code such as `re` may hold the GIL, so that no thread runs, and still
    # check for signals.
    with _handling(dict.fromkeys(_SIGNALS, _second_ends(handle_first, farewell))):
        # The wakeup descriptor gets the number of each signal as it arrives, even while Python code cannot run.
        fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=watch, name="verbatim-signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd_before)
            os.close(writer)
            watcher.join()
            os.close(reader)


def _second_ends(handle_first: Callable[[str], None], farewell: Callable[[], str] = lambda: "") -> _Handler:
    num_handled = 0

    def handle(number: int, frame: object) -> None:
        nonlocal num_handled
        num_handled += 1
        if num_handled > 1:
            _end_at_once(farewell())
        handle_first(_SIGNALS[number])

    return handle


def _end_at_once(farewell: str) -> None:
    """End the process without running any `finally` block, because a person who presses twice does not want to wait.
    Also show the cursor again, which a progress bar may have hidden."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
        os.write(2, f"\n{printable(farewell)}\n".encode(errors="replace"))
    os._exit(INTERRUPTED)


def sigterm_is_ctrl_c() -> None:
    """Handle SIGTERM like Ctrl-C wherever no `two_presses` or `second_press_ends` block runs: child processes are ended
    and the exit status is 130. The second SIGTERM ends the process immediately. If SIGTERM is ignored, it remains
    ignored."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _second_ends(raise_ctrl_c))


def end_at_a_press(status: int) -> None:
    """From now on Ctrl-C and SIGTERM end the process immediately, with this status. A signal that is ignored remains
    ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(status))


def ignore_presses() -> None:
    """From now on this process ignores Ctrl-C and SIGTERM: another process gets these signals too, and decides."""
    _set_all(signal.SIG_IGN)


def ignore_presses_at_the_very_end() -> None:
    """Called when the process begins. After the last `atexit` function Python removes its signal handlers, and a signal
    would then replace the exit status of a command that has finished. So this registers a last function that ignores
    signals."""
    atexit.register(_ignore_presses_on_the_main_thread)


def _ignore_presses_on_the_main_thread() -> None:
    # Another thread runs the last functions where the main one is stuck (`cli.ending`). It cannot set signal handlers,
    # and need not: `end_at_a_press` has set them.
    if threading.current_thread() is threading.main_thread():
        ignore_presses()


def leave_presses_to_the_run() -> None:
    """Like `ignore_presses`, but with handlers, because programs that this process starts would inherit SIG_IGN."""
    _set_all(lambda number, frame: None)


def end_at_presses() -> None:
    """Restore the default action of both signals."""
    _set_all(signal.SIG_DFL)


def _set_all(handler: _Handler | signal.Handlers) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)
