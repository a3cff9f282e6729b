"""Recognises requests that are sent again, so that each is answered and recorded once.

A client sends a request again after a time-out or a broken connection. Requests with one idempotency key are one
request. Of requests without a key, an equal one joins the oldest that was left: all clients that sent it went away
before they had its answer. One that says that it is a retry takes, in this order,

1. one that was left;
2. the place of one that failed and was not retried yet: it is answered anew;
3. one that a client still waits for, since a proxy may hide that its own client has gone;
4. the one that was delivered last, whose answer may have been lost on its way.

Any other equal request is a new one, and asks for an answer of its own. So n equal requests at a time are n answers,
and the retry of one of them gets the answer of the one that it repeats.
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
"""Exchanges that are over and are kept for those who ask again."""
_NOTICED = 0.1
"""Seconds in which the end of a connection is noticed: its client may have opened another one at once."""


class OtherRequest(Exception):
    """An idempotency key came with another request than before."""


class SessionEnded(Exception):
    """The session ended while an answer was waited for."""


@dataclass(eq=False)
class RequestExchange(Generic[T]):
    """One request and its answer, for all that ask for it."""

    task: asyncio.Task[T]
    digest: bytes
    progress: AnswerProgress
    delivered: bool = False
    """Whether a client has been sent the whole answer."""
    leaving: asyncio.TimerHandle | None = None
    """Cancels the task, because its client has gone."""
    was_left: bool = False
    """Whether that has happened."""
    was_retried: bool = False
    """Whether another exchange has taken the place of this one, which failed."""

    @property
    def is_usable(self) -> bool:
        """Whether there is an answer, or will be."""
        if not self.task.done():
            return not self.was_left
        return not self.task.cancelled() and self.task.exception() is None

    @property
    def is_missed(self) -> bool:
        """Whether there is an answer, or will be, and all clients went before they had it."""
        return self.is_usable and not self.delivered and self.progress.num_waiting == 0


class Exchanges(Generic[T]):
    """The requests of one session.

    Args:
        patience: Seconds for which an answer is still generated when its client has gone: it may come back.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._by_digest: dict[bytes, list[RequestExchange[T]]] = {}
        self._by_key: OrderedDict[str, RequestExchange[T]] = OrderedDict()
        self._over: deque[RequestExchange[T]] = deque()
        self._under_way: set[asyncio.Task[T]] = set()
        self.num_repeated = 0
        """Requests that were answered by an earlier one."""
        self.num_waiting = 0
        """Clients that wait for an answer now."""
        self.num_left = 0
        """Requests whose generation was cancelled, because their client had gone."""

    async def open(
        self,
        work: Callable[[AnswerProgress], Coroutine[Any, Any, T]],
        digest: bytes,
        *,
        progress: AnswerProgress,
        key: str = "",
        is_retry: bool = False,
    ) -> RequestExchange[T]:
        """The exchange of a request, begun now unless the request was sent before.

        Args:
            work: Answers it, and shows its progress.
            digest: Of all that the answer depends on.
            progress: Of an answer that is begun now.
            key: The idempotency key, if it has one.
            is_retry: Whether the client says that it has sent it before.

        Raises:
            OtherRequest: the key belongs to a request with another digest.
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
        """Someone waits for the answer, inside of the block. Once none does, its generation is cancelled after the
        patience."""
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
        """The answer. Called inside of `attend`.

        Raises:
            TimeoutError: it is not there after this many seconds; the caller may wait again.
            asyncio.CancelledError: the client has gone.
            SessionEnded: the session has ended.
            Exception: what answering raised.
        """
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(exchange.task)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if exchange.task.done() and not (task is not None and task.cancelling()):
                raise SessionEnded from None
            raise

    async def end(self) -> None:
        """Cancel what is under way, and wait until it has ended."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await settle(under_way)

    def _left(self, digest: bytes) -> RequestExchange[T] | None:
        """The oldest equal one that all clients left without an answer."""
        return next((found for found in self._by_digest.get(digest, ()) if found.is_missed), None)

    async def _retried(self, digest: bytes) -> RequestExchange[T] | None:
        """The one that a retry repeats; None: it has to be answered anew."""
        found, failed = self._left(digest), self._failed(digest)
        if found is None and failed is None and self._by_digest.get(digest):
            await asyncio.sleep(_NOTICED)
            found, failed = self._left(digest), self._failed(digest)
        if found is None and failed is not None:
            failed.was_retried = True
            return None
        usable = [one for one in self._by_digest.get(digest, ()) if one.is_usable]
        return found or next((one for one in usable if not one.delivered), usable[-1] if usable else None)

    def _failed(self, digest: bytes) -> RequestExchange[T] | None:
        """The oldest equal one that has no answer, and was not retried."""
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
            task.exception()  # it may be that none waits for it
        if is_keyed:
            return
        self._over.append(exchange)
        if len(self._over) > _MOST_KEPT:
            old = self._over.popleft()
            self._by_digest[old.digest].remove(old)
            if not self._by_digest[old.digest]:
                del self._by_digest[old.digest]
