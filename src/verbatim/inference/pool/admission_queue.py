"""Hands out places on replicas; requests that find none wait in line."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from verbatim.inference.pool.routing import Admission, Router


class AdmissionQueue:
    """A router with a line in front of it: first come, first served.

    Args:
        router: Decides where a request goes.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self._line: deque[asyncio.Future[None]] = deque()
        self._is_closed = self._is_held = False
        self._fewer = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    async def take(self, session: str, num_prompt_tokens: int, avoid: Collection[int] = ()) -> Admission | None:
        """A place, as `Router.take`; None once `close` was called."""
        has_waited = False
        while not self._is_closed:
            place = None
            if (has_waited or not self._line) and not self._is_held:
                place = self.router.take(session, num_prompt_tokens, avoid)
            if place is not None:
                self.call_next()  # there may be room for more than one
                return place
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._line.appendleft if has_waited else self._line.append)(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._line:
                    self._line.remove(turn)
                else:
                    self.call_next()  # it was this one's turn
                raise
            has_waited = True
        return None

    def leave(self, place: Admission) -> None:
        """A request has ended."""
        self.router.leave(place)
        self._fewer.set()
        self.call_next()

    def hold(self) -> None:
        """Every request waits in line from here on, until `release`."""
        self._is_held = True

    def release(self) -> None:
        """AdmissionQueue are handed out again."""
        self._is_held = False
        self.call_next()

    async def until_empty(self) -> None:
        """Wait until no request is on a replica."""
        while any(map(self.router.num_running, self.router.replicas)):
            self._fewer.clear()
            await self._fewer.wait()

    def remove(self, replica: int) -> None:
        """No request goes to this replica any more."""
        self.router.remove(replica)
        self._fewer.set()

    def add(self, replica: int) -> None:
        """Requests can go to this replica."""
        self.router.add(replica)
        self.call_next()

    def call_next(self) -> None:
        """Let the first in line look for a place."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def close(self) -> None:
        """Nothing is handed out any more; the line breaks up."""
        self._is_closed = True
        while self._line:
            self.call_next()
