"""Spreads the work of turns over the turns of the event loop, so that timers and connections are served in between."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

AT_A_TIME = 32
"""Turns, and episodes that start, in one turn of the event loop: about 5 ms of work, however many are ready at once.
A number and not a time, so that the order of events does not depend on the machine."""


class TurnLimiter:
    """Lets `AT_A_TIME` callers in for each turn of one event loop, in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_A_TIME
        self._is_turning = False

    async def enter(self) -> None:
        """Return at once where few came before in this turn of the loop, else in a later one."""
        if self._left and not self._waiting:
            self._left -= 1
            self._turn()
            return
        waiter = (self._loop() or asyncio.get_running_loop()).create_future()
        self._waiting.append(waiter)
        self._turn()
        await waiter

    def _turn(self) -> None:
        """Be called in the loop's next turn."""
        loop = self._loop()
        if not self._is_turning and loop is not None:
            self._is_turning = True
            loop.call_soon(self._next)

    def _next(self) -> None:
        self._is_turning, self._left = False, AT_A_TIME
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its caller was cancelled
                waiter.set_result(None)
                self._left -= 1
        if self._waiting or self._left < AT_A_TIME:
            self._turn()


_turn_limiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, TurnLimiter] = weakref.WeakKeyDictionary()


def turn_limiter() -> TurnLimiter:
    """The turn_limiter of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _turn_limiters.get(loop)
    if found is None:
        found = _turn_limiters[loop] = TurnLimiter(loop)
    return found
