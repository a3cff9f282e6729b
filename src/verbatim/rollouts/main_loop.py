"""Runs a coroutine to its end on an event loop that a user's code can neither end nor keep alive: on this thread, or on
a new one where a loop is already running here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.texts import error_text
from verbatim.core.user_code import is_ctrl_c, raise_ctrl_c

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that background tasks, and threads of the loop's pool, may take to end when the main one has ended."""

SIGNALS_SEEN_WITHIN = 0.1
"""Seconds between looks for Ctrl-C. A wait without a limit would go on through it: the system may hand the signal to
another thread than the one that waits."""

T = TypeVar("T")

Presses = Callable[[asyncio.AbstractEventLoop, "asyncio.Task[Any]"], AbstractContextManager[None]]
"""Handles Ctrl-C while a loop runs its main task."""

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
    presses = CtrlC(ask)
    if asyncio._get_running_loop() is None:
        return run_main(work, presses.handled_here, ends_without_memory=True)
    return _on_own_thread(work, presses)


class CtrlC:
    """Ctrl-C while a loop runs its main task: the first calls `ask`, which may be unable to end the work; the next one
    cancels the task."""

    def __init__(self, ask: Ask = lambda loop: False) -> None:
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


def _on_own_thread(work: Coroutine[Any, Any, T], presses: CtrlC) -> T:
    result: Future[T] = Future()

    def main() -> None:
        try:
            result.set_result(run_main(work, presses.heard_elsewhere, ends_without_memory=True))
        except BaseException as error:  # noqa: BLE001  carried to the caller
            result.set_exception(error)

    heard = told = 0

    def hear(number: int = signal.SIGINT, frame: object = None) -> None:
        nonlocal heard
        heard += 1
        if heard > 2:
            raise_ctrl_c()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(main,), name="verbatim-loop", daemon=True)
    with _handling_ctrl_c(hear):
        thread.start()
        while not result.done():
            try:
                while told < min(heard, 2):
                    told += 1
                    presses.press()
                thread.join(SIGNALS_SEEN_WITHIN)
            except KeyboardInterrupt:  # by a handler of the program's own, or the third one
                hear()
    return result.result()


@contextlib.contextmanager
def _handling_ctrl_c(handle: Callable[[int, object], None]) -> Iterator[None]:
    """While this thread waits: under `asyncio.run` the first Ctrl-C only cancels a task of the loop that waits too."""
    handler = signal.getsignal(signal.SIGINT)
    of_asyncio = isinstance(handler, functools.partial) and (
        getattr(handler.func, "__func__", None) is asyncio.Runner._on_sigint  # type: ignore[attr-defined]
    )
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not (of_asyncio or handler is signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def run_main(work: Coroutine[Any, Any, T], presses: Presses | None = None, *, ends_without_memory: bool = False) -> T:
    """What the coroutine returns, as `asyncio.run`. What a user's code left behind does not matter:

    - a background task that raises SystemExit or KeyboardInterrupt is logged, and the main task goes on;
    - background tasks that ignore their cancellation, and threads that hang, are not waited for at the end.

    Args:
        work: The main task.
        presses: What Ctrl-C does meanwhile; None = it cancels the main task.
        ends_without_memory: Whether memory that runs out in a callback of the event loop ends the main task. What the
            callback was to do is not done, and something may wait for it for ever. A server goes on all the same.

    Raises:
        BaseException: what the coroutine raised; or what such a callback did.
    """
    raise_descriptor_limit()
    loop = asyncio.new_event_loop()
    pool = ThreadPoolExecutor(thread_name_prefix="verbatim-pool")
    loop.set_default_executor(pool)
    asyncio.set_event_loop(loop)
    try:
        main = loop.create_task(work, name="main")
        not_done: list[BaseException] = []
        if ends_without_memory:
            loop.set_exception_handler(functools.partial(_end_without_memory, main, not_done))
        with (presses or CtrlC().handled_here)(loop, main):
            try:
                _run_until_done(loop, main)
                return main.result()
            except asyncio.CancelledError:
                if not_done:
                    raise not_done[0] from None
                raise
    finally:
        try:
            _end_tasks(loop)
            _end_threads(pool)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _end_without_memory(
    main: asyncio.Task[Any], not_done: list[BaseException], loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    error = context.get("exception")
    if "handle" in context and error is not None and is_out_of_memory(error):
        not_done.append(error)
        main.cancel()
    else:
        loop.default_exception_handler(context)


def _run_until_done(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
    while not main.done():
        try:
            loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt) as error:  # these end the loop, whichever task raises them
            if main.done() or is_ctrl_c(error):
                raise
            logger.error("a background task of an environment or a tool raised %s; the run goes on", error_text(error))


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        _go_on(loop, asyncio.wait(left, timeout=PATIENCE))
    stubborn = [task for task in left if not task.done()]
    for task in stubborn:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # said here, with its name
        logger.warning("the task %s ignored its cancellation, and is not waited for", task.get_name())
    for task in left:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task failed while it was cancelled at the end: %s", error_text(error))
    _go_on(loop, asyncio.wait_for(loop.shutdown_asyncgens(), PATIENCE))


def _go_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(TimeoutError):
        _run_until_done(loop, loop.create_task(work))


def _end_threads(pool: ThreadPoolExecutor) -> None:
    waiting = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
