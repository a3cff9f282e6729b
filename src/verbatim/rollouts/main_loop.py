"""Runs a coroutine on an event loop that user code can neither stop nor keep alive. The loop runs on this thread, or on
a new thread if this thread already runs a loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from verbatim.core.ctrl_c import Ask, CtrlC, Presses, is_ctrl_c, two_presses
from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.texts import error_text

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Number of seconds that background tasks get to end once the main task has ended. The threads of the loop's pool then
get the same number of seconds."""

SIGNALS_SEEN_WITHIN = 0.1
"""Seconds between checks for Ctrl-C. A wait without a timeout might not notice it, because the operating system may
deliver the signal to a thread that is not waiting."""

T = TypeVar("T")


def run_in_program(work: Coroutine[Any, Any, T], ask: Ask = lambda loop: False) -> T:
    """Run the coroutine in a script, a test or a notebook, and return its result.

    The first Ctrl-C calls `ask`, the second cancels the coroutine, the third raises KeyboardInterrupt in the code that
    is running at that moment. Signal handlers are changed only in the main thread, and only if the program has not
    installed its own. If this thread already runs an event loop (in a notebook), the coroutine runs on a new thread
    with its own loop.

    Raises:
        KeyboardInterrupt: Ctrl-C cancelled the coroutine.
        BaseException: the coroutine raised it.
    """
    presses = CtrlC(ask)
    if _runs_a_loop():
        return _on_own_thread(work, presses)
    return run_main(work, presses.handled_here, ends_without_memory=True)


def _runs_a_loop() -> bool:
    with contextlib.suppress(RuntimeError):  # no running loop
        return asyncio.get_running_loop() is not None
    return False


def _on_own_thread(work: Coroutine[Any, Any, T], presses: CtrlC) -> T:
    result: Future[T] = Future()

    def main() -> None:
        try:
            result.set_result(run_main(work, presses.heard_elsewhere, ends_without_memory=True))
        except BaseException as error:  # noqa: BLE001  carried to the caller
            result.set_exception(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(main,), name="verbatim-loop", daemon=True)
    with presses.handled():
        thread.start()
        while not result.done():
            try:
                thread.join(SIGNALS_SEEN_WITHIN)
            except KeyboardInterrupt:  # from the program's own handler, or from the third Ctrl-C
                presses.hear()
    return result.result()


def run_main(
    work: Coroutine[Any, Any, T],
    presses: Presses | None = None,
    *,
    ends_without_memory: bool = False,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> T:
    """Run the coroutine and return its result, like `asyncio.run`, but robust against tasks and threads of user code:

    - if a background task raises SystemExit or KeyboardInterrupt, this is logged, and the main task goes on;
    - at the end, background tasks that ignore their cancellation, and threads that hang, are not waited for.

    Args:
        work: The main task.
        presses: Handles Ctrl-C while the coroutine runs. If None, Ctrl-C cancels the main task.
        ends_without_memory: True if a MemoryError in a callback of the event loop should end the main task, because the
            callback's work is lost and a task may wait for it forever. A server passes False, to keep serving its other
            clients.
        new_loop: Creates the event loop.

    Raises:
        BaseException: the coroutine raised it, or it is the MemoryError of a callback.
    """
    raise_descriptor_limit()
    loop = new_loop()
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


def run_until_asked(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a server until the event that it is given is set. The first Ctrl-C or SIGTERM sets the event."""
    stop = asyncio.Event()

    def ask(loop: asyncio.AbstractEventLoop) -> bool:
        loop.call_soon_threadsafe(stop.set)
        return True

    run_main(serve(stop), two_presses(ask))


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
        # asyncio raises these two out of the loop, no matter which task raised them. Unless the main task raised it, or
        # it is a real Ctrl-C, run the loop again.
        except (SystemExit, KeyboardInterrupt) as error:
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
    loop.set_exception_handler(functools.partial(_not_said_again, {id(task) for task in stubborn}))
    for task in stubborn:
        logger.warning("the task %s ignored its cancellation and was abandoned", task.get_name())
    for task in left:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed during shutdown: %s", error_text(error))
    _go_on(loop, asyncio.wait_for(loop.shutdown_asyncgens(), PATIENCE))


def _not_said_again(said: set[int], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Suppress asyncio's message "Task was destroyed but it is pending" for tasks that `_end_tasks` has already
    logged."""
    if id(context.get("task")) in said and "exception" not in context:
        said.remove(id(context["task"]))
    else:
        loop.default_exception_handler(context)


def _go_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(TimeoutError):
        _run_until_done(loop, loop.create_task(work))


def _end_threads(pool: ThreadPoolExecutor) -> None:
    # On a daemon thread, because `shutdown` has no timeout, and a hanging thread would block it forever.
    waiting = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
