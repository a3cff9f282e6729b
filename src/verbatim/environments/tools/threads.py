"""Calls functions that may block on threads beside the event loop's."""

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
"""A thread that has nothing to do waits so long for the next call, because starting one takes 0.2 to 0.5 ms."""
MOST_KEPT = 256
"""Threads that wait at a time. A burst of calls leaves no more: a worker process with 1,000 threads is replaced
(`MOST_THREADS` of `rollouts.processes`)."""


async def in_thread(call: Callable[[], Any]) -> Any:
    """What a function returns that may block: it has a thread for itself, with the caller's context variables.

    There are as many threads as calls at a time. A call that hangs keeps its thread, and nothing else: neither other
    calls nor the end of the process wait for it.

    Raises:
        BaseException: what the function raised; a StopIteration as a RuntimeError, because coroutines cannot raise it.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # from here on it holds what the call gives, whether or not that is awaited
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _ToolThread()
    worker.calls.put((result, contextvars.copy_context(), call))
    try:
        return await asyncio.wrap_future(result)
    finally:
        del result  # it holds what was raised, whose traceback holds this frame: a cycle, with all that the call held


class _ToolThread:
    """A thread that takes one call after the other."""

    def __init__(self) -> None:
        _forgotten_in_copies()
        self.calls: SimpleQueue[tuple[Future[Any], contextvars.Context, Callable[[], Any]]] = SimpleQueue()
        # A daemon, and not of the loop's pool: a call that hangs would keep the process from ending, or block one of
        # the few threads for ever.
        threading.Thread(target=self._main, daemon=True, name="verbatim-tool").start()

    def _main(self) -> None:
        while True:
            try:
                given = self.calls.get(timeout=KEPT_SECONDS)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:  # taken in this moment: its call comes
                    continue
                return
            if not self._answer(*given):
                return
            del given

    def _answer(self, result: Future[Any], context: contextvars.Context, call: Callable[[], Any]) -> bool:
        """Run a call. Whether the thread waits for the next one."""
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
        if len(_idle) >= MOST_KEPT:
            return False
        _idle.append(self)
        return True


_idle: list[_ToolThread] = []
"""Threads without a call; the last one is taken first. `pop`, `remove` and `append` are each one operation of Python:
no lock is needed. A thread is here before its caller has the answer, so that the caller's next call finds it."""


@cache
def _forgotten_in_copies() -> None:
    """A forked process has none of the threads."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    _idle.clear()
