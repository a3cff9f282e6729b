"""Distinguishes Ctrl-C and task cancellation from the same exceptions raised by user code."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from typing import Any, NoReturn


def raise_ctrl_c(which: str = "Ctrl-C") -> NoReturn:
    """Called by our handlers of SIGINT and SIGTERM, so that `is_ctrl_c` recognizes their KeyboardInterrupt."""
    raise KeyboardInterrupt(which)


_HANDLERS = {raise_ctrl_c.__code__, asyncio.Runner._on_sigint.__code__}  # type: ignore[attr-defined]


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt is from the keyboard, not from `raise KeyboardInterrupt` in the user's code.

    Signals reach only the main thread, and an exception of a Python handler has the handler's frame innermost. Python's
    default handler has no frame, so under it every KeyboardInterrupt counts as Ctrl-C.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_code in _HANDLERS


def is_told_to_end(task: asyncio.Task[Any] | None) -> bool:
    """Whether a Ctrl-C has cancelled this task: `asyncio.run` answers the first one so, in the task that it runs."""
    handler = signal.getsignal(signal.SIGINT)
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    if not isinstance(handler, functools.partial) or not isinstance(runner, asyncio.Runner):
        return False
    return handler.keywords.get("main_task") is task and runner._interrupt_count > 0  # type: ignore[attr-defined]


def is_running(task: asyncio.Task[Any] | None) -> bool:
    """Whether this is the task that runs now; False while its coroutine is garbage collected."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs any more
        return False


def let_go(error: BaseException | None) -> None:
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
