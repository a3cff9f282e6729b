"""Ctrl-C and SIGTERM: every handler of a signal that the project installs stands here.

```
CtrlC             presses while an event loop runs its main task: in a program or a notebook, and in a command
two_presses       a command: the first press asks, the second ends the process at once, even if the code blocks
is_ctrl_c         tells a KeyboardInterrupt of the keyboard from `raise KeyboardInterrupt` in a user's code
users_errors      makes one error of all that a user's code raises, and lets Ctrl-C through
the rest          processes that leave the signals to another one, and what happens before and after a command
```

`inference.vllm.subreaper` is a process that has only the standard library, and handles its signals itself.
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
"""The status of a process that Ctrl-C or SIGTERM has ended."""
_SIGNALS = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
"""The signals that ask a process to end, by the names for people."""

Ask: TypeAlias = Callable[[asyncio.AbstractEventLoop], bool]
"""Asks the work on this loop to end soon; False where it cannot. Called on any thread."""

Presses: TypeAlias = Callable[[asyncio.AbstractEventLoop, "asyncio.Task[Any]"], AbstractContextManager[None]]
"""Handles Ctrl-C while a loop runs its main task."""

_Handler: TypeAlias = Callable[[int, object], None]


def raise_ctrl_c(which: str = "Ctrl-C") -> NoReturn:
    """Called by our handlers of SIGINT and SIGTERM, so that `is_ctrl_c` recognizes their KeyboardInterrupt."""
    raise KeyboardInterrupt(which)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt is from the keyboard, not from `raise KeyboardInterrupt` in the user's code.

    Signals reach only the main thread, and what a Python handler raises comes through the handler's frame. Python's
    default handler has no frame, so under it every KeyboardInterrupt counts as Ctrl-C.
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
    """Replace any exception that a user's code raises in the block (also `sys.exit`) by the error that `told` makes of
    it. Ctrl-C and the errors of the classes `passed` are raised as they are."""
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
    """Whether a Ctrl-C has come since the block began, which the program's own handler answers as ever. `asyncio.run`
    answers the first one by cancelling the task that it runs, which a tool may do as well."""
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
    """Whether this is how `asyncio.run` handles Ctrl-C."""
    function = handler.func if isinstance(handler, functools.partial) else handler
    return isinstance(getattr(function, "__self__", None), asyncio.Runner)


@contextlib.contextmanager
def _handling(handlers: Mapping[int, _Handler]) -> Iterator[None]:
    """While the block runs; only in the main thread, where another one has no handlers."""
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
    """Presses while a loop runs its main task: the first calls `ask`, which may be unable to end the work; the next one
    cancels the task, whose cancellation is a KeyboardInterrupt then."""

    def __init__(self, ask: Ask = lambda loop: False) -> None:
        self._ask = ask
        self._num = self._num_signals = 0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled_by: str | None = None

    def press(self, which: str = "Ctrl-C") -> None:
        """One press, on any thread."""
        self._num += 1
        if self._running is None:
            return
        loop, main = self._running
        if self._num == 1 and self._ask(loop):
            return
        self._cancel(which, loop, main)

    def _cancel(self, which: str, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
        self._cancelled_by = which
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(main.cancel)

    def hear(self, number: int = signal.SIGINT, frame: object = None) -> None:
        """One signal, in the main thread; the third one raises KeyboardInterrupt where the code is."""
        self._num_signals += 1
        if self._num_signals > 2:
            raise_ctrl_c()
        # On a thread: the code that was interrupted may hold the lock of the console that `ask` prints on.
        threading.Thread(target=self.press, name="verbatim-signals", daemon=True).start()

    def handled(self) -> AbstractContextManager[None]:
        """While the block runs. Outside the main thread, and where the program has a handler of its own, none is
        changed; that of `asyncio.run` would only cancel a task of the loop that waits for the block."""
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler or _is_of_asyncio(handler):
            return _handling({signal.SIGINT: self.hear})
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def heard_elsewhere(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
        """For `run_main`, where `press` and `hear` are called from outside."""
        self._running = (loop, main)
        try:
            if self._num:  # pressed before there was a loop
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
        """For `run_main`, on the thread that hears of Ctrl-C."""
        with self.heard_elsewhere(loop, main), self.handled():
            yield


def two_presses(ask: Ask = lambda loop: False, farewell: Callable[[], str] = lambda: "") -> Presses:
    """For `run_main` of a command.

    A thread hears of the signals, not the event loop, so the second one ends the process also where a user's code
    blocks the loop, or catches everything that is raised.

    Args:
        ask: Called on that thread at the first press; whether it asked for the end. Otherwise the main task is
            cancelled.
        farewell: What to write before the process ends at once.
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
    """While the block runs, the first Ctrl-C or SIGTERM is told, the second one ends the process at once. Outside the
    main thread nothing is handled.

    Args:
        first: Called on a thread at the first one, with its name, even while the main thread is blocked.
        farewell: What to write before the process ends at once.
        handle_first: Called in the main thread at the first one, as soon as that comes to Python code; may raise.
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
    os.set_blocking(writer, False)
    # The handler of the second one is for C code that holds the interpreter, so that no thread runs, but looks for
    # signals (`re` does).
    with _handling(dict.fromkeys(_SIGNALS, _second_ends(handle_first, farewell))):
        # Python writes a signal's number there as it arrives.
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
    """No `finally` of anyone's runs: whoever asks twice does not want to wait for them. A cursor that a bar has hidden
    is shown again."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
        os.write(2, f"\n{printable(farewell)}\n".encode(errors="replace"))
    os._exit(INTERRUPTED)


def sigterm_is_ctrl_c() -> None:
    """Handle SIGTERM as Ctrl-C outside the blocks above: child processes are ended, and the status is 130. The second
    one ends the process at once. If SIGTERM is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _second_ends(raise_ctrl_c))


def end_at_a_press(status: int) -> None:
    """From now on Ctrl-C and SIGTERM end the process at once, with this status. Where one is ignored, it stays so."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(status))


def ignore_presses() -> None:
    """From now on Ctrl-C and SIGTERM of this process do nothing: another one hears of them too, and decides."""
    _set_all(signal.SIG_IGN)


def ignore_presses_at_the_very_end() -> None:
    """Called when the process begins: while Python takes itself down, after all `atexit` functions, it has no handlers
    any more, and a signal would end a command that is done with the signal's status."""
    atexit.register(ignore_presses)


def leave_presses_to_the_run() -> None:
    """As `ignore_presses`, with handlers, which the programs that this process starts do not inherit."""
    _set_all(lambda number, frame: None)


def end_at_presses() -> None:
    """As a process does that handles nothing."""
    _set_all(signal.SIG_DFL)


def _set_all(handler: _Handler | signal.Handlers) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)
