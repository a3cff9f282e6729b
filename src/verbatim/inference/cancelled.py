"""Counts the tokens of completions that are never delivered, because the call was cancelled or the engine failed.

In both cases `generate` raises, and the exception carries the number of sampled tokens, so that the caller can count
them in the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


def cancelled(num_tokens: int, *, num_lost_tokens: int = 0) -> asyncio.CancelledError:
    """Make the error that a cancelled `generate` call raises once the engine has ended the request.

    The counts are attributes of a plain CancelledError, because `asyncio.timeout` of Python 3.11 compares the exact
    type and would not turn a subclass into TimeoutError.

    Args:
        num_tokens: Number of tokens sampled before the cancellation, which are not delivered.
        num_lost_tokens: Number of tokens sampled for the same call by replicas that were lost earlier.
    """
    error = asyncio.CancelledError()
    error.num_tokens = num_tokens  # type: ignore[attr-defined]
    error.num_lost_tokens = num_lost_tokens  # type: ignore[attr-defined]
    return error


def num_tokens_drawn(end: BaseException) -> int:
    """Number of tokens sampled for a call that ended with this error; 0 if the engine does not report this number."""
    return int(getattr(end, "num_tokens", 0))


def num_tokens_lost(end: BaseException) -> int:
    """Number of tokens sampled by lost replicas for a call that ended with this error; 0 if the number is unknown."""
    return int(getattr(end, "num_lost_tokens", 0))


async def settle(futures: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all futures are done, even if the caller is cancelled meanwhile. The cancellation is re-raised at the
    end.

    Used for results that arrive soon and must not be lost, such as the token count of a cancelled request.
    """
    cancelled: asyncio.CancelledError | None = None
    while left := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
