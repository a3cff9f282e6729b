"""Counts tokens whose completion is never delivered: a call that was cancelled, an engine that failed.

Both leave `generate` as exceptions, and both know how many tokens had been drawn, so that whoever asked can count them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


def cut_off(num_tokens: int) -> asyncio.CancelledError:
    """What a cancelled `generate` call raises, once the engine has let go of it.

    No class of its own: `asyncio.timeout` takes a CancelledError only.

    Args:
        num_tokens: Drawn until then; whoever cancelled gets none of them.
    """
    error = asyncio.CancelledError()
    error.num_tokens = num_tokens  # type: ignore[attr-defined]
    return error


def num_tokens_drawn(end: BaseException) -> int:
    """Tokens that were drawn for a call that ended with this; 0 where the engine does not say."""
    return int(getattr(end, "num_tokens", 0))


async def settle(futures: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all are done, also where the caller is cancelled meanwhile; that is raised at the end.

    For what is sure to end soon, and has to be known: an engine's answer to a cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while left := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
