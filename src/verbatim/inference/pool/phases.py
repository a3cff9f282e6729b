"""Applies timeouts whose errors name the replica and the phase."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from verbatim.core.errors import SamplerFault
from verbatim.inference.pool.replica import TooSlow


@contextlib.asynccontextmanager
async def phase(name: str, doing: str, seconds: float) -> AsyncIterator[None]:
    """Apply a timeout to the block, and name replica and phase in its errors.

    Raises:
        TooSlow: the block timed out.
        SamplerFault: the block raised it; the replica and the phase are added to its message.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TooSlow(f"{name}: {doing}: no answer within {seconds:g} s") from None
    except SamplerFault as fault:
        raise SamplerFault(f"{name}: {doing}: {fault}") from fault
