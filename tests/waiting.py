"""Waiting for what happens elsewhere.

A test waits for an event, never for a time: it goes on as soon as the condition holds. The limit only ends a test that
hangs, so it is far longer than any machine may stand still.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANGS = 300.0
"""Seconds after which a wait is given up: what is waited for will never happen."""


async def until(condition: Callable[[], object], seconds: float = HANGS) -> None:
    """Let all else work until this holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (it happens in other processes, which set no event of ours)
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], seconds: float = HANGS) -> None:
    """`until` in a test that is no coroutine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{condition} does not hold after {seconds:g} s"
        time.sleep(0.005)
