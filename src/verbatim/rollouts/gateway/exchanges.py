"""Recognises retries, so that each request is answered and recorded once.

A client retries a request after a timeout or a broken connection. Requests with the same idempotency key are one
request. A request without a key joins the oldest equal request that was abandoned, which means that all of its clients
disconnected before they had the answer. A request that is marked as a retry takes the first of these that exists:

1. the answer of an abandoned request;
2. the place of a failed request that was not retried yet, so that the retry is answered from scratch;
3. the answer of a request whose client is still waiting, since a proxy may hide that its own client has disconnected;
4. the answer that was delivered last, since it may have been lost on its way.

Any other equal request is new. So n equal concurrent requests get n answers, and a retry of one of these requests gets
the answer of the request that it repeats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verbatim.inference.cancelled import settle
from verbatim.rollouts.gateway.delivery import AnswerProgress

T = TypeVar("T")

_MOST_KEPT = 128
"""Maximum number of finished exchanges that are kept for retries."""
_NOTICED = 0.1
"""Number of seconds within which a closed connection is noticed. A client may retry on a new connection before the
closed connection is noticed."""


class OtherRequest(Exception):
    """Raised when an idempotency key was reused for a different request."""


class SessionEnded(Exception):
    """Raised when the session ends while a client is waiting for an answer."""


@dataclass(eq=False)
class RequestExchange(Generic[T]):
    """One request and its answer, shared by all clients that sent the request."""

    task: asyncio.Task[T]
    digest: bytes
    progress: AnswerProgress
    delivered: bool = False
    """True once the whole answer was sent to a client."""
    leaving: asyncio.TimerHandle | None = None
    """Timer that cancels the task after all clients have disconnected; None while a client is waiting."""
    was_left: bool = False
    """True once the timer has cancelled the task."""
    was_retried: bool = False
    """True if this exchange failed and the exchange of a retry has taken its place."""

    @property
    def is_usable(self) -> bool:
        """True if the exchange has an answer, or its answer is still being made."""
        if not self.task.done():
            return not self.was_left
        return not self.task.cancelled() and self.task.exception() is None

    @property
    def is_missed(self) -> bool:
        """True if the exchange is usable, but all clients disconnected before they had the answer."""
        return self.is_usable and not self.delivered and self.progress.num_waiting == 0


class Exchanges(Generic[T]):
    """The requests of one session.

    Args:
        patience: Seconds for which generation continues after the client has disconnected, since the client may retry.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._by_digest: dict[bytes, list[RequestExchange[T]]] = {}
        self._by_key: OrderedDict[str, RequestExchange[T]] = OrderedDict()
        self._over: deque[RequestExchange[T]] = deque()
        self._under_way: set[asyncio.Task[T]] = set()
        self.num_repeated = 0
        """Number of requests that joined the exchange of an earlier request."""
        self.num_waiting = 0
        """Number of clients that are waiting for an answer."""
        self.num_left = 0
        """Number of requests that were cancelled because their clients had disconnected."""

    async def open(
        self,
        work: Callable[[AnswerProgress], Coroutine[Any, Any, T]],
        digest: bytes,
        *,
        progress: AnswerProgress,
        key: str = "",
        is_retry: bool = False,
    ) -> RequestExchange[T]:
        """Return the exchange of a request: an earlier exchange if this is a retry, otherwise a new exchange.

        Args:
            work: Answers the request, and reports the progress of the answer.
            digest: Digest of everything on which the answer depends.
            progress: The progress object for a new answer.
            key: The idempotency key, or "" if the request has none.
            is_retry: True if the client marked the request as a retry.

        Raises:
            OtherRequest: the key belongs to a request with a different digest.
        """
        if key:
            found = self._by_key.get(key)
            if found is not None and found.digest != digest:
                raise OtherRequest(key)
            found = found if found is not None and found.is_usable else None
        else:
            found = await self._retried(digest) if is_retry else self._left(digest)
        if found is not None:
            self.num_repeated += 1
            return found
        task = asyncio.create_task(work(progress), name="gateway-exchange")
        exchange = RequestExchange(task=task, digest=digest, progress=progress)
        self._under_way.add(exchange.task)
        exchange.task.add_done_callback(lambda task: self._ended(exchange, task, is_keyed=bool(key)))
        if key:
            self._by_key[key] = exchange
            self._by_key.move_to_end(key)
            if len(self._by_key) > _MOST_KEPT:
                self._by_key.popitem(last=False)
        else:
            self._by_digest.setdefault(digest, []).append(exchange)
        return exchange

    @contextlib.contextmanager
    def attend(self, exchange: RequestExchange[T]) -> Iterator[None]:
        """Context manager in which a client waits for the answer. When the last client leaves before the answer is
        ready, the request is cancelled after `patience` seconds."""
        self.num_waiting += 1
        exchange.progress.num_waiting += 1
        if exchange.leaving is not None:
            exchange.leaving.cancel()
            exchange.leaving = None
        try:
            yield
        finally:
            self.num_waiting -= 1
            exchange.progress.num_waiting -= 1
            if exchange.progress.num_waiting == 0 and not exchange.task.done():
                loop = asyncio.get_running_loop()
                exchange.leaving = loop.call_later(self._patience, self._leave, exchange)

    async def wait(self, exchange: RequestExchange[T], seconds: float | None = None) -> T:
        """Wait for the answer, and return it. Must be called inside `attend`.

        Raises:
            TimeoutError: the answer is not ready after `seconds`; the caller may wait again.
            asyncio.CancelledError: the client has disconnected.
            SessionEnded: the session has ended.
            Exception: `work` raised it while answering the request.
        """
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(exchange.task)  # a client that leaves must not cancel it for the others
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if exchange.task.done() and not (task is not None and task.cancelling()):
                raise SessionEnded from None
            raise

    async def end(self) -> None:
        """Cancel all requests in flight, and wait until they have ended."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await settle(under_way)

    def _left(self, digest: bytes) -> RequestExchange[T] | None:
        """Return the oldest exchange with this digest whose clients all disconnected before they had the answer, or
        None."""
        return next((found for found in self._by_digest.get(digest, ()) if found.is_missed), None)

    async def _retried(self, digest: bytes) -> RequestExchange[T] | None:
        """Return the exchange that a retry joins, or None if the retry must be answered from scratch."""
        found, failed = self._left(digest), self._failed(digest)
        if found is None and failed is None and self._by_digest.get(digest):
            # The retry may have arrived before the end of the first connection was noticed.
            await asyncio.sleep(_NOTICED)
            found, failed = self._left(digest), self._failed(digest)
        if found is None and failed is not None:
            failed.was_retried = True
            return None
        usable = [one for one in self._by_digest.get(digest, ()) if one.is_usable]
        return found or next((one for one in usable if not one.delivered), usable[-1] if usable else None)

    def _failed(self, digest: bytes) -> RequestExchange[T] | None:
        """Return the oldest exchange with this digest that failed and was not retried, or None."""
        known = self._by_digest.get(digest, ())
        return next((one for one in known if not one.is_usable and not one.was_retried), None)

    def _leave(self, exchange: RequestExchange[T]) -> None:
        if exchange.progress.num_waiting == 0 and not exchange.task.done():
            self.num_left += 1
            exchange.was_left = True
            exchange.task.cancel()

    def _ended(self, exchange: RequestExchange[T], task: asyncio.Task[T], *, is_keyed: bool) -> None:
        self._under_way.discard(task)
        exchange.progress.wake()
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it if no client waits
        if is_keyed:
            return
        self._over.append(exchange)
        if len(self._over) > _MOST_KEPT:
            old = self._over.popleft()
            self._by_digest[old.digest].remove(old)
            if not self._by_digest[old.digest]:
                del self._by_digest[old.digest]
