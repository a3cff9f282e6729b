"""Calls functions that may block, on threads that do not belong to the event loop's pool."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

KEPT_SECONDS = 10.0
"""Seconds that an idle thread waits for another call before it ends. It waits because starting a thread takes 0.2 to
0.5 ms."""
MOST_KEPT = 256
"""Maximum number of idle threads. Threads beyond this number end after a burst of calls, because a worker process with
1,000 threads would be replaced (`MOST_THREADS` in `rollouts.processes`)."""


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run a function in a separate thread, because it may block. The function sees the caller's context variables.

    Each call in progress has a thread to itself. So a call that hangs occupies only that thread: neither other calls
    nor the end of the process wait for it.

    Raises:
        BaseException: the function raised it. StopIteration becomes a RuntimeError, because coroutines cannot raise it.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # cancelling it is refused from here on, so that `set_result` cannot fail
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _ToolThread()
    worker.calls.put((result, contextvars.copy_context(), call))
    try:
        return await asyncio.wrap_future(result)
    finally:
        # The future holds the exception, and the exception's traceback holds this frame. Break this cycle, because it
        # keeps the call's objects alive.
        del result


class _ToolThread:
    """A thread that runs one call after another."""

    def __init__(self) -> None:
        _forgotten_in_copies()
        self.calls: SimpleQueue[tuple[Future[Any], contextvars.Context, Callable[[], Any]]] = SimpleQueue()
        # A daemon thread, because a call that hangs must not keep the process from ending. Not a thread of the event
        # loop's pool, because such a call would occupy one of that pool's few threads forever.
        threading.Thread(target=self._main, daemon=True, name="verbatim-tool").start()

    def _main(self) -> None:
        while True:
            try:
                given = self.calls.get(timeout=KEPT_SECONDS)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:  # a caller popped this thread just now: its call is about to arrive
                    continue
                return
            if not self._answer(*given):
                return
            del given

    def _answer(self, result: Future[Any], context: contextvars.Context, call: Callable[[], Any]) -> bool:
        """Run a call, and pass its outcome to `result`. Returns True if this thread then waits for the next call."""
        try:
            value = context.run(call)
        except StopIteration as stop:
            waits = self._wait()
            result.set_exception(RuntimeError(f"the tool raised StopIteration: {stop}"))
        except BaseException as error:  # noqa: BLE001  passed to the caller, which counts it
            waits = self._wait()
            result.set_exception(error)
        else:
            waits = self._wait()
            result.set_result(value)
        finally:
            del result  # as in `in_thread`
        return waits

    def _wait(self) -> bool:
        """Become idle. Returns False if there are enough idle threads. Called before the caller gets its result (see
        `_idle`)."""
        if len(_idle) >= MOST_KEPT:
            return False
        _idle.append(self)
        return True


_idle: list[_ToolThread] = []
"""The idle threads. The thread at the end of the list is taken first, so that the other threads can time out. No lock
is needed, because `pop`, `remove` and `append` are atomic in CPython. A thread is added before its caller gets the
result, so that the caller's next call finds the thread here."""


@cache
def _forgotten_in_copies() -> None:
    """Empty the list in the child after a fork, because threads are not copied. Registered once, with the first
    thread."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    _idle.clear()
