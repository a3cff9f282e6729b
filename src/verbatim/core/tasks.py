"""Runs coroutines side by side, and ends tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, in order. The first that raises cancels the others; what it raised is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


async def cancel_all(unfinished: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what is not done, and wait for it: nothing runs on, and no exception of theirs stays unread."""
    futures = list(unfinished)
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
