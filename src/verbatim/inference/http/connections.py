"""The HTTP/1.1 server: uvicorn's protocol, with additional deadlines for a request's head and for unread responses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from verbatim.core.tasks import cancel_all
from verbatim.inference.http.acceptor import Acceptor
from verbatim.inference.http.doors import ConnectionTable, Door
from verbatim.inference.http.limits import CONNECTION, DOOR, TINY_CHUNKS

_KEEP_ALIVE = 75
"""Seconds for which an idle connection is kept. Our clients keep an idle connection for a shorter time, so that the
client closes first and no request arrives while the server is closing the connection."""
_GRACE, _POLL = 5.0, 0.01
"""Seconds that requests in flight get to finish when the server stops, and seconds between two checks whether they have
finished."""
_HEAD_AT_ONCE, _CHUNKS_AT_ONCE, _BODY_AT_ONCE = 2**12, 2**14, 2**18
"""Maximum bytes read in one pass of the event loop. A body with a content-length is passed on unparsed, so its limit is
the highest. The bytes after a head may be thousands of tiny chunks, which are parsed one by one, so the other limits
are lower."""
_LINGER, _DISCARDED = 2.0, 2**22
"""Limits, in seconds and in bytes, for reading and discarding what the client still sends after a refusal. Closing a
connection with unread bytes resets it, and the client may then never see the response."""
_PAYLOAD, _JUDGED = 0.8, 2**12
"""Minimum share of payload in a chunked body (the rest is framing), and the number of bytes that must have been
received before this minimum applies."""


class _Messages(h11.Connection):
    """The HTTP parser and writer of one connection. It differs from h11's in two ways:

    - Every head above the limit is refused. h11 only checks incomplete heads, and accepts a longer head that ends
    within the same read.
    - The head of a response is written together with the first part of its body, if that part follows in the same pass
      of the event loop. This saves a system call in the server, and a read in the client.

    Args:
        most: Maximum bytes of a request's head.
        write: Writes bytes to the client.
    """

    def __init__(self, most: int, write: Callable[[bytes], None]) -> None:
        super().__init__(h11.SERVER, most)
        self._most, self._write = most, write
        self._head = b""
        """The head of the response, held back until it can be written together with the body."""

    def next_event(self) -> Any:
        """As in h11, but raises RemoteProtocolError for every head that is too long."""
        # `trailing_data` is the data that h11 has not parsed yet. The part that a Request event consumes is the head.
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if isinstance(event, h11.Request) and before - len(self.trailing_data[0]) > self._most:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise h11.RemoteProtocolError("the head is too long", error_status_hint=status)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """As in h11, but holds back a response's head until the next data or the next pass of the event loop."""
        data = super().send_with_data_passthrough(event)
        if isinstance(event, h11.Response):
            self._head = b"".join(data or ())
            asyncio.get_running_loop().call_soon(self._write_head)
            return []
        if self._head:
            data, self._head = [self._head, *(data or ())], b""
        return data

    def _write_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._write(head)


class ClientConnection(H11Protocol):
    """One client's connection. It is closed if a request's head is late or the client does not read its response."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, *, table: ConnectionTable, door: Door | None = None
    ) -> None:
        super().__init__(config, server_state, {DOOR: door, CONNECTION: self})
        self.conn = _Messages(table.limits.head_bytes, self._write)
        self._table, self._door = table, door
        self.group = "" if door is None else door.name
        """Name of the connection's door, or else the client's host."""
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._refused = False
        self._num_discarded = 0
        """Number of bytes received after a refusal."""
        self._num_received = self._num_payload = 0
        """Number of bytes of a chunked body with and without the framing."""

    @property
    def is_gone(self) -> bool:
        """True if nothing can be sent to the client any more."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and wait for the head of the first request."""
        super().connection_made(transport)
        self.group = self.group or (self.client[0] if self.client else "")
        self._read_at_once(_HEAD_AT_ONCE)
        self._table.add(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table and stop its timers."""
        self._table.remove(self)
        self._head = _cancelled(self._head)
        self._reading = _cancelled(self._reading)
        super().connection_lost(exc)
        self.app_state = {}  # break a reference cycle, so that closed connections are freed without garbage collection

    def data_received(self, data: bytes) -> None:
        """Parse new bytes; after a refusal, discard them."""
        if self._refused:
            self._num_discarded += len(data)
            if self._num_discarded > _DISCARDED:
                self.abort()
            return
        # uvicorn appends the bytes of a body to `cycle.body`, which may also have bytes that the application has not
        # read.
        before, num_before = self.cycle, 0 if self.cycle is None else len(self.cycle.body)
        super().data_received(data)
        self._go_on(len(data), len(self.cycle.body) - num_before if self.cycle is before and self._busy else None)

    def _go_on(self, size: int, payload: int | None) -> None:
        """Set how much is read next, and the deadline of a head. The arguments have the same meaning as for
        `_take_chunks`."""
        if self._refused:
            return
        if self._busy:
            self._head = _cancelled(self._head)
            self._table.has_request(self)
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                self._take_chunks(size, payload)
            else:
                self._read_at_once(_BODY_AT_ONCE)
        elif not self.transport.is_closing():
            if not self._in_body:
                self._read_at_once(_HEAD_AT_ONCE)
            if self._head is None:
                self._expect_head()

    def _take_chunks(self, size: int, payload: int | None) -> None:
        """Continue to read a chunked body, unless its chunks are tiny. Parsing one chunk costs as much as parsing
        kilobytes of text.

        Args:
            size: Number of bytes received.
            payload: Number of these bytes that belong to the body; None if the bytes include the request's head,
                because then this number is unknown.
        """
        if not self._table.limits.takes_chunks:
            self._end_body()
            return
        if payload is None:
            self._num_received = self._num_payload = 0
        else:
            self._num_received, self._num_payload = self._num_received + size, self._num_payload + payload
        if self._num_received >= _JUDGED and self._num_payload < _PAYLOAD * self._num_received:
            self.scope["state"][TINY_CHUNKS] = True
            self._end_body()
            self.cycle.more_body = False  # the application sees the body's end, and `read_whole` refuses the request
            self.cycle.message_event.set()
        else:
            self._read_at_once(_CHUNKS_AT_ONCE if self._num_received >= _CHUNKS_AT_ONCE else _HEAD_AT_ONCE)

    def _end_body(self) -> None:
        """Stop reading the body. The request is answered without it, and then the connection is closed."""
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Wait for the next request. Called when the response is written, though the client may not have read it yet.
        If the client is still sending a refused body, the rest is first read quickly and discarded."""
        self._read_at_once(_BODY_AT_ONCE if self._in_body else _HEAD_AT_ONCE)
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reading()
        if not self._busy and self in self._table.open:
            self._table.waits(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP (status 400) or a head that is too long (status 431). The refusal is delayed
        by `refusal_seconds`, like every refusal."""
        if not self._refused:
            self._refused = True
            self.flow.pause_reading()
            status = getattr(sys.exception(), "error_status_hint", 400)  # uvicorn is handling h11's error
            self.loop.call_later(self._table.limits.refusal_seconds, self._refuse, status, msg)

    def _refuse(self, status: int, msg: str) -> None:
        """Send the refusal, and discard what the client still sends. The connection is closed when the client closes
        it, or after `_LINGER`."""
        if self.transport.is_closing():
            return
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            msg = f"the head of a request, or of a chunk, is longer than {self._table.limits.head_bytes} bytes"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"connection", b"close"),
                (b"content-length", b"%d" % len(msg)),
            ]
            answer = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            for event in (answer, h11.Data(data=msg.encode("ascii")), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self._busy:  # the error is in a request's body, so the application must not wait for the rest
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():  # half-close, so that the client sees the end of the response immediately
            self.transport.write_eof()
        self._table.waits(self)
        _cancelled(self._head)
        self._head = self.loop.call_later(_LINGER, self.abort)
        self._read_at_once(_BODY_AT_ONCE)
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """Close the connection once the request in flight is answered. Called when the server stops."""
        if self._refused:
            self.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Start the deadline, because the client reads more slowly than the response is written."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop the deadline, because the client has read."""
        super().resume_writing()
        self._reading = _cancelled(self._reading)

    def abort(self) -> None:
        """Close the connection immediately, without sending buffered data."""
        self._table.remove(self)
        self.transport.abort()

    @property
    def _busy(self) -> bool:
        """True while a request has not been fully answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _in_body(self) -> bool:
        """True while the client is sending the body of a request."""
        return self.conn.their_state is h11.SEND_BODY

    def _write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def _read_at_once(self, size: int) -> None:
        """Limit the bytes of the next reads, so that one client's data cannot hold up the event loop."""
        with contextlib.suppress(AttributeError):  # asyncio's transports have `max_size`, uvloop's do not
            self.transport.max_size = size  # type: ignore[attr-defined]

    def _expect_head(self) -> None:
        """Mark the connection as idle, and start the deadline for the next head."""
        self._table.waits(self)
        self._head = self.loop.call_later(self._table.limits.head_seconds, self._head_is_late)

    def _expect_reading(self) -> None:
        """Start the deadline for the client to read its response."""
        if self._reading is None:
            self._reading = self.loop.call_later(self._table.limits.answer_seconds, self._reading_is_late)

    def _head_is_late(self) -> None:
        self._head = None
        if not self._busy:  # if busy, the head is complete
            self.abort()

    def _reading_is_late(self) -> None:
        self._reading = None
        if (
            self.transport.get_write_buffer_size()
        ):  # for a response below the high-water mark, resume_writing is never called
            self.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer. Returns None, to be assigned to the attribute that held the timer."""
    if timer is not None:
        timer.cancel()
    return None


class Server:
    """Serves an ASGI application over HTTP/1.1 in the caller's event loop, with uvicorn's connection protocol.

    `uvicorn.Server` is not used, because it would install signal handlers, and Ctrl-C belongs to the owner of the event
    loop.

    Args:
        app: The ASGI application.
        table: Table of the open connections.
    """

    def __init__(self, app: ASGIApp, table: ConnectionTable) -> None:
        self._config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        self._config.load()
        self._state, self._table = ServerState(), table
        self._acceptors: set[Acceptor] = set()

    def listen_on(self, listening: socket.socket, door: Door | None = None) -> Acceptor:
        """Accept connections on a socket that is bound and listening."""

        def make() -> ClientConnection:
            return ClientConnection(self._config, self._state, table=self._table, door=door)

        acceptor = Acceptor(listening, make, self._table, door)
        self._acceptors.add(acceptor)
        return acceptor

    def stop_listening(self, acceptor: Acceptor) -> None:
        """Stop accepting connections on a socket, and close its queued connections."""
        self._acceptors.discard(acceptor)
        acceptor.close()

    async def stop(self, grace: float = _GRACE) -> None:
        """Stop accepting, wait up to `grace` seconds for requests in flight, then close the remaining connections."""
        for acceptor in list(self._acceptors):
            self.stop_listening(acceptor)
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110  (uvicorn has no event for it)
                    await asyncio.sleep(_POLL)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await cancel_all(self._state.tasks)
