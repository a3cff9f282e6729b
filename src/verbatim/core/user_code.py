"""What a user's code raised: in which task, and what its traceback keeps alive."""

from __future__ import annotations

import asyncio
from typing import Any


def is_running(task: asyncio.Task[Any] | None) -> bool:
    """Whether this is the task that runs now; False while its coroutine is garbage collected."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs any more
        return False


def drop_tracebacks(error: BaseException | None) -> None:
    """Forget where an exception, and those behind or in it, were raised. A traceback holds its frames and their
    callers', and a caller that still knows the exception is in a cycle with it: everything that they worked with would
    be kept until garbage is collected."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            BaseException.with_traceback(found, None)  # an exception that is a frozen dataclass takes no assignment
            left += [found.__cause__, found.__context__]
            left += found.exceptions if isinstance(found, BaseExceptionGroup) else ()
