"""Runs a coroutine to its end on an event loop that a user's code can neither end nor keep alive."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from verbatim.machine_faults import is_out_of_memory
from verbatim.texts import error_text
from verbatim.user_code import is_ctrl_c, raise_ctrl_c

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that background tasks, and threads of the loop's pool, may take to end when the main one has ended."""

T = TypeVar("T")

Presses = Callable[[asyncio.AbstractEventLoop, "asyncio.Task[Any]"], AbstractContextManager[None]]
"""Handles Ctrl-C while a loop runs its main task."""


@contextlib.contextmanager
def cancel_then_raise(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> Iterator[None]:
    """The first Ctrl-C cancels the main task, the second one raises KeyboardInterrupt where the code is.

    Nothing is changed where SIGINT has another handler than Python's own, or outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    num_presses = 0

    def press(number: int, frame: object) -> None:
        nonlocal num_presses
        num_presses += 1
        if num_presses > 1 or main.done():
            raise_ctrl_c()
        main.cancel()
        loop.call_soon_threadsafe(lambda: None)  # it may be asleep

    signal.signal(signal.SIGINT, press)
    try:
        yield
    except asyncio.CancelledError:
        if num_presses:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_main(
    work: Coroutine[Any, Any, T], presses: Presses = cancel_then_raise, *, ends_without_memory: bool = False
) -> T:
    """What the coroutine returns, as `asyncio.run`. What a user's code left behind does not matter:

    - a background task that raises SystemExit or KeyboardInterrupt is logged, and the main task goes on;
    - background tasks that ignore their cancellation, and threads that hang, are not waited for at the end.

    Args:
        work: The main task.
        presses: What Ctrl-C does meanwhile.
        ends_without_memory: Whether memory that runs out in a callback of the event loop ends the main task. What the
            callback was to do is not done, and something may wait for it for ever. A server goes on all the same.

    Raises:
        BaseException: what the coroutine raised; or what such a callback did.
    """
    loop = asyncio.new_event_loop()
    pool = ThreadPoolExecutor(thread_name_prefix="verbatim-pool")
    loop.set_default_executor(pool)
    asyncio.set_event_loop(loop)
    try:
        main = loop.create_task(work, name="main")
        not_done: list[BaseException] = []
        if ends_without_memory:
            loop.set_exception_handler(functools.partial(_end_without_memory, main, not_done))
        with presses(loop, main):
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
