"""Waiting for what happens elsewhere."""

from collections.abc import Awaitable, Callable

LIMITS = (1.0, 5.0, 25.0)
"""Seconds of the deadlines that are tried in turn."""


def under_some_deadline(check: Callable[[float], None]) -> None:
    """Check with each deadline in turn until one holds. What must be cut off waits for longer than any of them; on a
    machine that stands still, the short ones also cut off what they should not."""
    for limit in LIMITS[:-1]:
        try:
            return check(limit)
        except AssertionError:
            continue
    return check(LIMITS[-1])


async def under_some_deadline_async(check: Callable[[float], Awaitable[None]]) -> None:
    """`under_some_deadline` of coroutines."""
    for limit in LIMITS[:-1]:
        try:
            return await check(limit)
        except AssertionError:
            continue
    return await check(LIMITS[-1])
