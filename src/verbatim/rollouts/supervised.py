"""Runs user code in a separate asyncio task. An exception in user code fails only its episode. User code that is still
running after its deadline is abandoned."""

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
"""Grace period of user code in seconds, from its cancellation on. A task that is still running after this period is
abandoned."""

T = TypeVar("T")

left_behind: set[asyncio.Task[Any]] = set()
"""The abandoned tasks of this process that are still running. They are kept here because the event loop holds only weak
references to tasks."""


class LeftBehind(Exception):
    """Raised when the task ignored its cancellation and was abandoned. It may still be running; its result is not
    used."""


class UserCalls:
    """The calls into user code that are made on one task. The task is abandoned after `seconds` (see `within`)."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        """The task on which the user code runs."""
        self._handle: asyncio.TimerHandle | None = None
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Future that is done when the task is to be abandoned."""
        self.told_to_end = False
        """True once the supervisor has cancelled the task. A CancelledError in the task then does not come from user
        code."""
        self.may_not_be_cancelled = False
        """True while the task cleans up under its own deadline. The supervisor then waits, and does not cancel it."""
        self.deadline: asyncio.Timeout | None = None
        """The timeout of the current call, which cancels the task; None if the call has no timeout."""
        self.now = "start"
        """Name of the current call, or of the last call if no call is running, for messages."""
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """Abandon the task `seconds` from now, or never if `seconds` is infinite. Replaces the limit set before."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(seconds, self._end) if math.isfinite(seconds) else None

    def task_ended(self) -> None:
        """Stop the timer, because the task has ended or was abandoned."""
        if self._handle is not None:
            self._handle.cancel()
        self.over.cancel()

    def guard(self, what: str) -> UserCallGuard:
        """Return a context manager for a block of user code.

        Raises:
            EnvironmentFault: the code raised any exception, including SystemExit, KeyboardInterrupt, GeneratorExit, and
                a CancelledError that the code caused itself. A real Ctrl-C, and the supervisor's cancellation, pass
                through.
            TimeoutError: the code swallowed its cancellation and returned after its deadline.
        """
        self.now = what
        return UserCallGuard(self, what)

    def is_over(self) -> bool:
        """Return True if the task was cancelled or is past its deadline. A CancelledError then does not come from user
        code, and a result comes too late."""
        return self.told_to_end or (self.deadline is not None and self.deadline.expired())

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class UserCallGuard:
    """The context manager that `UserCalls.guard` returns."""

    __slots__ = ("_calls", "_what")

    def __init__(self, calls: UserCalls, what: str) -> None:
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        """Enter the block. Does nothing; all work is done in `__exit__`."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        what = self._what
        if error is None:
            if self._calls.is_over():
                raise TimeoutError
            return
        # The error is classified already. A ModelError concerns every episode (for example, the chat template cannot
        # render tools), so it ends the run.
        if isinstance(error, EpisodeOver | RolloutError | ModelError):
            return
        if isinstance(error, asyncio.CancelledError):
            if self._calls.is_over():
                return
            raise EnvironmentFault(f"{what} awaited something that was cancelled") from error
        # Python also raises GeneratorExit in a coroutine that is garbage-collected; that one must pass through.
        if is_ctrl_c(error) or (isinstance(error, GeneratorExit) and not is_running(self._calls.task)):
            return
        raise EnvironmentFault(f"{what} raised {error_text(error)}") from error


async def supervise(work: Coroutine[Any, Any, T], calls: UserCalls) -> T:
    """Run a coroutine in a separate task, and return its result.

    If the caller is cancelled, the task is cancelled too. It then has `GRACE` seconds to end, or the time that it has
    set itself with `calls.within`.

    Raises:
        LeftBehind: the task was still running when its time was over.
        asyncio.CancelledError: the caller was cancelled, or the task cancelled itself (`calls.told_to_end` is then
            False).
        BaseException: the coroutine raised it.
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
        task.exception()  # retrieved, or asyncio would log the error of an abandoned task
