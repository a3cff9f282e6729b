"""Handles exceptions raised by a user's code: tells whether a task is still running, and frees the memory that
tracebacks keep alive."""

from __future__ import annotations

import asyncio
from typing import Any


def is_running(task: asyncio.Task[Any] | None) -> bool:
    """True if this task is running now; False while its coroutine is garbage-collected."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs any more
        return False


def drop_tracebacks(error: BaseException | None) -> None:
    """Remove the tracebacks of an exception and of its causes, contexts and members. A traceback references the frames
    of all callers, and a caller that references the exception forms a cycle with it: the objects of all these frames
    would be kept until the next garbage collection."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            # This is not an assignment, because an exception that is a frozen dataclass refuses assignments.
            BaseException.with_traceback(found, None)
            left += [found.__cause__, found.__context__]
            left += found.exceptions if isinstance(found, BaseExceptionGroup) else ()
