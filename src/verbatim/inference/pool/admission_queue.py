"""Admits requests to replicas. Requests for which no replica has room wait in a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from verbatim.inference.pool.routing import Admission, Router


class AdmissionQueue:
    """A router with a first-come, first-served queue in front of it.

    Args:
        router: Decides which replica a request goes to.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self._line: deque[asyncio.Future[None]] = deque()
        self._is_closed = self._is_held = False
        self._fewer = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._line)

    async def take(self, session: str, num_prompt_tokens: int, avoid: Collection[int] = ()) -> Admission | None:
        """Wait for a place on a replica, as given by `Router.take`. Returns None once `close` has been called."""
        has_waited = False
        while not self._is_closed:
            place = None
            # A new request must not overtake the requests in the queue.
            if (has_waited or not self._line) and not self._is_held:
                place = self.router.take(session, num_prompt_tokens, avoid)
            if place is not None:
                self.call_next()  # there may be room for more than one request
                return place
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            # A request that was woken but found no room goes back to the front.
            (self._line.appendleft if has_waited else self._line.append)(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._line:
                    self._line.remove(turn)
                else:
                    self.call_next()  # this request was woken and cancelled at the same time, so wake the next one
                raise
            has_waited = True
        return None

    def leave(self, place: Admission) -> None:
        """Return the place of a request that has ended."""
        self.router.leave(place)
        self._fewer.set()
        self.call_next()

    def hold(self) -> None:
        """Make every request wait in the queue until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Admit requests again."""
        self._is_held = False
        self.call_next()

    async def until_empty(self) -> None:
        """Wait until no replica has a request in flight."""
        while any(map(self.router.num_running, self.router.replicas)):
            self._fewer.clear()
            await self._fewer.wait()

    def remove(self, replica: int) -> None:
        """Send no more requests to this replica."""
        self.router.remove(replica)
        self._fewer.set()  # `until_empty` no longer counts this replica's requests

    def add(self, replica: int) -> None:
        """Admit requests to this replica."""
        self.router.add(replica)
        self.call_next()

    def call_next(self) -> None:
        """Wake the first request in the queue, which then asks the router."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():  # it is done if its request was cancelled
                turn.set_result(None)
                return

    def close(self) -> None:
        """Admit no more requests. `take` returns None for all requests in the queue."""
        self._is_closed = True
        while self._line:
            self.call_next()
