"""Spreads the work of turns over passes of the event loop, so that timers and sockets are served in between."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

AT_A_TIME = 32
"""Maximum number of turns and episode starts in one pass of the event loop; together they are about 5 ms of work. The
limit is a count, not a time, so that the order of events does not depend on the speed of the machine."""


class TurnLimiter:
    """Admits at most `AT_A_TIME` callers in each pass of one event loop, in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # weak: a limiter is a value of `_turn_limiters`, whose weak key is the loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_A_TIME
        self._is_turning = False

    async def enter(self) -> None:
        """Return immediately if there is room in this pass of the loop, otherwise wait for a later pass."""
        if self._left and not self._waiting:
            self._left -= 1
            self._turn()
            return
        waiter = (self._loop() or asyncio.get_running_loop()).create_future()
        self._waiting.append(waiter)
        self._turn()
        await waiter

    def _turn(self) -> None:
        """Schedule `_next` for the loop's next pass."""
        loop = self._loop()
        if not self._is_turning and loop is not None:
            self._is_turning = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        self._is_turning, self._left = False, AT_A_TIME
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # otherwise its caller was cancelled, and takes no place
                waiter.set_result(None)
                self._left -= 1
        if self._waiting or self._left < AT_A_TIME:
            self._turn()


_turn_limiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, TurnLimiter] = weakref.WeakKeyDictionary()


def turn_limiter() -> TurnLimiter:
    """Return the turn limiter of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _turn_limiters.get(loop)
    if found is None:
        found = _turn_limiters[loop] = TurnLimiter(loop)
    return found
