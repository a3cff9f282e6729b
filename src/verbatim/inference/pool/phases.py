"""Limits of time that name the replica and what it was doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from verbatim.core.errors import SamplerFault
from verbatim.inference.pool.replica import TooSlow


@contextlib.asynccontextmanager
async def phase(name: str, doing: str, seconds: float) -> AsyncIterator[None]:
    """Name the replica and the phase in what goes wrong within it.

    Raises:
        TooSlow: it takes longer.
        SamplerFault: what is raised within.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TooSlow(f"{name}: {doing}: no answer within {seconds:g} s") from None
    except SamplerFault as fault:
        raise SamplerFault(f"{name}: {doing}: {fault}") from fault
