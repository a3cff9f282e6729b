"""Runs coroutines concurrently, and cancels tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines, in order. The first coroutine that raises cancels the others, and its error is
    raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


async def cancel_all(unfinished: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the unfinished futures and wait for them, so that nothing keeps running and their exceptions are
    retrieved."""
    futures = list(unfinished)
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
