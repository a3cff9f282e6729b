"""Runs a user's code on a task of its own: whatever it raises is the fault of its episode, and where it goes on after
its deadline it is abandoned."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from verbatim.core.ctrl_c import is_ctrl_c
from verbatim.core.errors import EnvironmentFault, ModelError, RolloutError
from verbatim.core.texts import error_text
from verbatim.core.user_code import is_running
from verbatim.rollouts.loop import EpisodeOver

GRACE = 10.0
"""Seconds that user code may take to end once it was cancelled. What still runs then is not waited for."""

T = TypeVar("T")

left_behind: set[asyncio.Task[Any]] = set()
"""Tasks of this process that ignored their cancellation and still run; the event loop holds its tasks weakly."""


class LeftBehind(Exception):
    """The task ignored its cancellation; it may still run, and its result is not used."""


class UserCalls:
    """The calls into the user's code on one task, which is left behind after `seconds` (see `within`)."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        """The one that the user's code runs on."""
        self._handle: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done when the task is to be left behind."""
        self.told_to_end = False
        """The supervisor has cancelled the task: a CancelledError in it is not the user's own."""
        self.may_not_be_cancelled = False
        """It is cleaning up, under a deadline of its own: the supervisor only waits."""
        self.deadline: asyncio.Timeout | None = None
        """Cancels the task when the time of what runs now is over."""
        self.now = "start"
        """What runs, or ran last."""
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """It is left behind after so many seconds from now; never, where they are infinite."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, self._end) if math.isfinite(seconds) else None

    def task_ended(self) -> None:
        """The task has ended."""
        if self._handle is not None:
            self._handle.cancel()
        self.over.cancel()

    def guard(self, what: str) -> UserCallGuard:
        """A `with` block around user code.

        Raises:
            EnvironmentFault: it raised anything at all: SystemExit, KeyboardInterrupt, GeneratorExit and a
                CancelledError of its own making included. Ctrl-C and our own cancellation pass through.
            TimeoutError: it returned after its time, because it swallowed the cancellation.
        """
        self.now = what
        return UserCallGuard(self, what)

    def is_over(self) -> bool:
        """Whether the task was told to end: a CancelledError is not the user's own, and a result comes too late."""
        return self.told_to_end or (self.deadline is not None and self.deadline.expired())

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class UserCallGuard:
    """The `with` block of `UserCalls.guard`."""

    __slots__ = ("_calls", "_what")

    def __init__(self, calls: UserCalls, what: str) -> None:
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        what = self._what
        if error is None:
            if self._calls.is_over():
                raise TimeoutError
            return
        if isinstance(error, EpisodeOver | RolloutError | ModelError):  # a model that cannot do what is asked fails all
            return
        if isinstance(error, asyncio.CancelledError):
            if self._calls.is_over():
                return
            raise EnvironmentFault(f"{what} awaited something that was cancelled") from error
        # GeneratorExit also ends a coroutine that is thrown away.
        if is_ctrl_c(error) or (isinstance(error, GeneratorExit) and not is_running(self._calls.task)):
            return
        raise EnvironmentFault(f"{what} raised {error_text(error)}") from error


async def supervise(work: Coroutine[Any, Any, T], calls: UserCalls) -> T:
    """Run a coroutine on a task of its own; what it returns.

    Where the caller is cancelled, the task is too, and is waited for as long as `calls` says, `GRACE` at first.

    Raises:
        LeftBehind: it still ran when its time was over.
        asyncio.CancelledError: the caller is cancelled; or the task was, by itself (`calls.told_to_end` is False).
        BaseException: what the coroutine raised.
    """
    task = asyncio.create_task(work)
    calls.task = task
    either: set[asyncio.Future[Any]] = {task, calls.over}
    try:
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            calls.told_to_end = True
            if not calls.may_not_be_cancelled:
                calls.within(GRACE)
                task.cancel()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if not task.done():
            calls.told_to_end = True
            raise LeftBehind
        return task.result()
    finally:
        calls.task_ended()
        if task.done():
            calls.task = None
        else:
            task.cancel()
            left_behind.add(task)
        task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    left_behind.discard(task)
    if not task.cancelled():
        task.exception()
