"""Runs user code in a task of its own: cancelled at its deadline, and abandoned where it goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

GRACE = 10.0
"""Seconds that user code may take to end once it was cancelled. What still runs then is not waited for."""

T = TypeVar("T")

_left_behind: set[asyncio.Task[Any]] = set()
"""Held here, because the event loop holds its tasks by weak references."""


class LeftBehind(Exception):
    """The task ignored its cancellation; it may still run, and its result is not used."""


class Leash:
    """Until when a supervised task may run; may be moved while it runs."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.told_to_end = False
        """The supervisor has cancelled the task: a CancelledError in it is not the user's own."""
        self.may_not_be_cancelled = False
        """It is cleaning up, under a deadline of its own: the supervisor only waits."""
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """It is left behind after so many seconds from now; never, where they are infinite."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, self._end) if math.isfinite(seconds) else None

    def let_go(self) -> None:
        """The task has ended."""
        if self._handle is not None:
            self._handle.cancel()
        self.over.cancel()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def supervise(work: Coroutine[Any, Any, T], leash: Leash, *, name: str | None = None) -> T:
    """Run a coroutine on a task of its own; what it returns.

    Where the caller is cancelled, the task is too, and is waited for as long as its leash says, `GRACE` at first.

    Raises:
        LeftBehind: it still ran when its leash was over.
        asyncio.CancelledError: the caller is cancelled; or the task was, by itself (`leash.told_to_end` is False).
        BaseException: what the coroutine raised.
    """
    task = asyncio.create_task(work, name=name)
    either: set[asyncio.Future[Any]] = {task, leash.over}
    try:
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            leash.told_to_end = True
            if not leash.may_not_be_cancelled:
                leash.within(GRACE)
                task.cancel()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if not task.done():
            leash.told_to_end = True
            raise LeftBehind
        return task.result()
    finally:
        leash.let_go()
        if not task.done():
            task.cancel()
            _left_behind.add(task)
        task.add_done_callback(_forget)


def num_left_behind() -> int:
    """Tasks of this process that ignored their cancellation and still run."""
    return len(_left_behind)


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()
