"""RPC between two processes over a socket. Each end can call methods of the other end, any number of them concurrently.

A message is a pickled tuple after 8 bytes with the tuple's length. The tuple has the message's kind, the call's number
and the arguments.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verbatim.core.errors import VerbatimError
from verbatim.core.texts import error_text
from verbatim.rollouts.workers.worker import CannotBeSent

_HEAD = 8
LARGEST = 2**30
"""Maximum size of one message in bytes. A length above this means that the data is damaged."""


class RpcConnection(asyncio.Protocol):
    """One end of the socket. The other end may call `methods` by name. Of the errors that a method raises, only a
    `VerbatimError` is sent back. A method must itself handle every other error, or the caller would wait forever."""

    def __init__(self, methods: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
        self._methods = methods
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._numbers = itertools.count()
        self._calling: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self.broken: str | None = None
        """The reason why received bytes could not be read; None if there was no error."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done when either end has closed the connection."""

    async def call(self, method: str, *given: Any) -> Any:
        """Call a method of the other end, and return its result. If this call is cancelled, the method is cancelled
        too.

        Raises:
            VerbatimError: the method raised it.
            Exception: an argument cannot be pickled, or the error was passed to `fail`.
        """
        number = next(self._numbers)
        answer = self._calling[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("call", number, method, *given)
            return await answer
        except asyncio.CancelledError:
            self._send("cancel", number)
            raise
        finally:
            del self._calling[number]

    def fail(self, error: Exception) -> None:
        """Make all calls of this end that wait for a result raise this error."""
        for answer in self._calling.values():
            if not answer.done():
                answer.set_exception(error)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the calls that the other end has made. Return the tasks that answer these calls."""
        answering = list(self._answering.values())
        for task in answering:
            task.cancel()
        return answering

    def close(self) -> None:
        """Close this end once all messages are sent."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, *message: Any) -> None:
        """Send one message. Does nothing if the connection is closed."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(body).to_bytes(_HEAD, "big") + body)

    def _received(self, what: str, number: int, *parts: Any) -> None:
        if what == "call":
            task = asyncio.create_task(self._answer(number, *parts), name=f"{parts[0]}-{number}")
            self._answering[number] = task
            task.add_done_callback(lambda _: self._answering.pop(number))
        elif what == "cancel":
            if number in self._answering:
                self._answering[number].cancel()
        elif (answer := self._calling.get(number)) is not None and not answer.done():
            if what == "returned":
                answer.set_result(*parts)
            else:
                kind, message = parts
                answer.set_exception(kind(message))

    async def _answer(self, number: int, method: str, *given: Any) -> None:
        try:
            value = await self._methods[method](*given)
        except (VerbatimError, CannotBeSent) as error:
            self._send("raised", number, type(error), str(error))
        else:
            self._send("returned", number, value)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the connected socket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Receive bytes, which may be part of a message or several messages, and handle each complete message."""
        self._buffer += data
        while self.broken is None and len(self._buffer) >= _HEAD:
            end = _HEAD + int.from_bytes(self._buffer[:_HEAD], "big")
            if end > _HEAD + LARGEST:
                self._break(f"a message of {end - _HEAD:,} bytes")
                return
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD:end])
            del self._buffer[:end]
            try:
                message = pickle.loads(body)  # noqa: S301  (from our own process at the other end)
                assert isinstance(message, tuple)
            except Exception as error:  # noqa: BLE001  (unpickling may raise anything)
                self._break(error_text(error, 200))
                return
            self._received(*message)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is closed."""
        if not self.closed.done():
            self.closed.set_result(None)

    def _break(self, why: str) -> None:
        self.broken = why
        self._buffer.clear()
        if self._transport is not None:
            self._transport.abort()
