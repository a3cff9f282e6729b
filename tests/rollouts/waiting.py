"""Waiting for what happens elsewhere."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Let everybody else work until this holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (it happens in other processes, which set no event of ours)
            await asyncio.sleep(0.005)
