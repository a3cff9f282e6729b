"""Runs pieces of a user's code so that whatever they raise is the fault of their episode."""

from __future__ import annotations

import asyncio
from types import TracebackType

from verbatim.errors import EnvironmentFault, ModelError, RolloutError
from verbatim.rollouts.loop import EpisodeOver
from verbatim.rollouts.supervised import Leash
from verbatim.texts import error_text
from verbatim.user_code import is_ctrl_c


class UserCalls:
    """The calls into the user's code of one episode, which share its deadline.

    Args:
        leash: The leash of the task that they run on.
    """

    def __init__(self, leash: Leash) -> None:
        self._leash = leash
        self.deadline: asyncio.Timeout | None = None
        """Cancels the task when the time of what runs now is over."""
        self.now = "start"
        """What runs, or ran last."""

    @property
    def is_over(self) -> bool:
        """Whether the task was told to end: a CancelledError is not the user's own, and a result comes too late."""
        return self._leash.told_to_end or (self.deadline is not None and self.deadline.expired())

    def guard(self, what: str) -> _Guarded:
        """A `with` block around user code.

        Raises:
            EnvironmentFault: it raised anything at all: SystemExit, KeyboardInterrupt, GeneratorExit and a
                CancelledError of its own making included. Ctrl-C and our own cancellation pass through.
            TimeoutError: it returned after its time, because it swallowed the cancellation.
        """
        self.now = what
        return _Guarded(self, what)


class _Guarded:
    def __init__(self, calls: UserCalls, what: str) -> None:
        self._calls, self._what = calls, what
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        over = self._calls.is_over
        if error is None:
            if over:
                raise TimeoutError
            return
        # A model that cannot do what is asked fails every episode alike.
        if isinstance(error, EpisodeOver | RolloutError | ModelError) or is_ctrl_c(error):
            return
        if isinstance(error, asyncio.CancelledError):
            if over:
                return
            raise EnvironmentFault(f"{self._what} awaited something that was cancelled") from error
        if isinstance(error, GeneratorExit) and not self._is_running():
            return  # the coroutine is being thrown away
        raise EnvironmentFault(f"{self._what} raised {error_text(error)}") from error

    def _is_running(self) -> bool:
        try:
            return asyncio.current_task() is self._task
        except RuntimeError:  # no event loop runs any more
            return False
