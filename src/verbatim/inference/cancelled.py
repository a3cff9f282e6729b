"""Counts tokens whose completion is never delivered: of cancelled calls and failed engines.

Both leave `generate` as exceptions that hold how many tokens had been drawn, so that the caller can count them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


def cancelled(num_tokens: int, *, num_lost_tokens: int = 0) -> asyncio.CancelledError:
    """The error of a cancelled `generate` call, once the engine has ended it.

    It is no subclass, because `asyncio.timeout` accepts CancelledError only.

    Args:
        num_tokens: Tokens drawn until then; they are not delivered.
        num_lost_tokens: Tokens drawn for the call before by replicas that were lost.
    """
    error = asyncio.CancelledError()
    error.num_tokens = num_tokens  # type: ignore[attr-defined]
    error.num_lost_tokens = num_lost_tokens  # type: ignore[attr-defined]
    return error


def num_tokens_drawn(end: BaseException) -> int:
    """Tokens drawn for a call that ended with this error; 0 if the engine does not report them."""
    return int(getattr(end, "num_tokens", 0))


def num_tokens_lost(end: BaseException) -> int:
    """Tokens drawn for a call that ended with this error, by replicas that were lost before; 0 if it is not known."""
    return int(getattr(end, "num_lost_tokens", 0))


async def settle(futures: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all are done, even if the caller is cancelled meanwhile; the cancellation is raised at the end.

    For results that come soon and must not be lost, such as an engine's answer to a cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while left := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
