"""Messages between two processes over a socket: each is its length in 8 bytes, then a pickled tuple."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from verbatim.texts import error_text

_HEAD = 8
LARGEST = 2**30
"""Most bytes of one message; a larger length means damaged data."""


class Frames(asyncio.Protocol):
    """One end of the socket. Messages arrive complete and in order.

    Args:
        received: Called with the parts of each message.
    """

    def __init__(self, received: Callable[..., None]) -> None:
        self._received = received
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self.broken: str | None = None
        """Why received bytes could not be read; None = no error."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when either end has closed the connection."""

    def send(self, *message: Any) -> None:
        """Send one message; does nothing if the connection is closed.

        Raises:
            Exception: a part cannot be pickled; nothing was sent.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(len(body).to_bytes(_HEAD, "big") + body)

    def close(self) -> None:
        """Close this end once all messages are sent."""
        if self._transport is not None:
            self._transport.close()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read bytes of one or several messages."""
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
            except Exception as error:  # noqa: BLE001  (unpickling raises anything)
                self._break(error_text(error, 200))
                return
            self._received(*message)

    def connection_lost(self, error: Exception | None) -> None:
        """The other end is closed."""
        if not self.closed.done():
            self.closed.set_result(None)

    def _break(self, why: str) -> None:
        self.broken = why
        self._buffer.clear()
        if self._transport is not None:
            self._transport.abort()
