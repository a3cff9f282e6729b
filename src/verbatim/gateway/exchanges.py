"""Recognises requests that are sent again, so that each is answered and recorded once.

A client sends a request again after a time-out or a broken connection. It is the same request if it has the same
idempotency key; if it says that it is a retry; or if the client that sent it first has gone without an answer. An equal
request is otherwise a new one: it asks for a second answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verbatim.inference.cut_off import settle

T = TypeVar("T")

_MOST_KEPT = 128
"""Answers that are kept for those who ask again."""


class OtherRequest(Exception):
    """An idempotency key came with another request than before."""


class Ended(Exception):
    """The session ended while an answer was waited for."""


@dataclass(eq=False)
class Exchange(Generic[T]):
    """One request and its answer, for all that ask for it."""

    task: asyncio.Task[T]
    digest: bytes
    num_waiting: int = 0
    delivered: bool = False
    """Whether a client has been sent the whole answer."""
    leaving: asyncio.TimerHandle | None = None
    """Cancels the task, because its client has gone."""
    was_left: bool = False
    """Whether that has happened."""

    @property
    def is_usable(self) -> bool:
        """Whether there is an answer, or will be."""
        if not self.task.done():
            return not self.was_left
        return not self.task.cancelled() and self.task.exception() is None


class Exchanges(Generic[T]):
    """The requests of one session.

    Args:
        patience: Seconds for which an answer is still generated when its client has gone: it may come back.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._by_digest: OrderedDict[bytes, Exchange[T]] = OrderedDict()
        self._by_key: OrderedDict[str, Exchange[T]] = OrderedDict()
        self._under_way: set[asyncio.Task[T]] = set()
        self.num_repeated = 0
        """Requests that were answered by an earlier one."""
        self.num_left = 0
        """Requests whose generation was cancelled, because their client had gone."""

    def open(
        self, work: Callable[[], Coroutine[Any, Any, T]], digest: bytes, *, key: str = "", is_retry: bool = False
    ) -> Exchange[T]:
        """The exchange of a request, begun now unless the request was sent before.

        Args:
            work: Answers it.
            digest: Of all that the answer depends on.
            key: The idempotency key, if it has one.
            is_retry: Whether the client says that it has sent it before.

        Raises:
            OtherRequest: the key belongs to a request with another digest.
        """
        found = self._by_key.get(key) if key else self._by_digest.get(digest)
        if key and found is not None and found.digest != digest:
            raise OtherRequest(key)
        if found is not None and found.is_usable and (key or is_retry or self._missed_it(found)):
            self.num_repeated += 1
            return found
        exchange = Exchange(task=asyncio.create_task(work(), name="gateway-exchange"), digest=digest)
        self._under_way.add(exchange.task)
        exchange.task.add_done_callback(self._ended)
        _keep(self._by_digest, digest, exchange)
        if key:
            _keep(self._by_key, key, exchange)
        return exchange

    async def wait(self, exchange: Exchange[T], seconds: float | None = None) -> T:
        """The answer.

        Raises:
            TimeoutError: it is not there after this many seconds; the caller may wait again.
            asyncio.CancelledError: the client has gone.
            Ended: the session has ended.
            Exception: what answering raised.
        """
        exchange.num_waiting += 1
        if exchange.leaving is not None:
            exchange.leaving.cancel()
            exchange.leaving = None
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(exchange.task)
        except TimeoutError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if exchange.task.done() and not (task is not None and task.cancelling()):
                raise Ended from None
            if not exchange.task.done() and exchange.num_waiting == 1:
                loop = asyncio.get_running_loop()
                exchange.leaving = loop.call_later(self._patience, self._leave, exchange)
            raise
        finally:
            exchange.num_waiting -= 1

    async def end(self) -> None:
        """Cancel what is under way, and wait until it has ended."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await settle(under_way)

    def _missed_it(self, exchange: Exchange[T]) -> bool:
        """Whether all clients went before they had the answer."""
        return not exchange.delivered and exchange.num_waiting == 0

    def _leave(self, exchange: Exchange[T]) -> None:
        if exchange.num_waiting == 0 and not exchange.task.done():
            self.num_left += 1
            exchange.was_left = True
            exchange.task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # it may be that none waits for it


def _keep(kept: OrderedDict[Any, Exchange[T]], key: Any, exchange: Exchange[T]) -> None:
    kept[key] = exchange
    kept.move_to_end(key)
    if len(kept) > _MOST_KEPT:
        kept.popitem(last=False)
