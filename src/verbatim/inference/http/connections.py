"""Serves over HTTP, and closes connections that a client holds idle: uvicorn has no deadline for the head of a request
or for a client that does not read."""

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
"""Seconds that an idle connection is kept: longer than clients do, so that none is closed as a request arrives."""
_GRACE, _POLL = 5.0, 0.01
"""Seconds for requests under way to be answered when the server stops, and between two looks whether they are."""
_HEAD_AT_ONCE, _CHUNKS_AT_ONCE, _BODY_AT_ONCE = 2**12, 2**14, 2**18
"""Most bytes read in one turn. A body of known length is passed on as it comes; a head may be followed by thousands
of tiny chunks, which are parsed one by one."""
_LINGER, _DISCARDED = 2.0, 2**22
"""Seconds, and most bytes, for which a client may send on what was refused: a connection that is closed while bytes
come is reset, and the answer to it may be lost."""
_PAYLOAD, _JUDGED = 0.8, 2**12
"""The least share of a chunked body that is not about its chunks, once so many bytes of it have come."""


class _Messages(h11.ClientConnection):
    """One connection's HTTP.

    - Every head of more bytes than it may have is refused. h11 itself refuses those that have not come to their end,
      and takes what ends in the same read.
    - The head of an answer is written with the first part of its body, if that comes in the same turn of the event
      loop: a system call, and for the client a read, less.

    Args:
        most: Bytes of a head.
        write: Writes to the client.
    """

    def __init__(self, most: int, write: Callable[[bytes], None]) -> None:
        super().__init__(h11.SERVER, most)
        self._most, self._write = most, write
        self._head = b""
        """Of the answer, as long as it is not written."""

    def next_event(self) -> Any:
        """As h11's; a RemoteProtocolError for a head that is too long."""
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if isinstance(event, h11.Request) and before - len(self.trailing_data[0]) > self._most:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise h11.RemoteProtocolError("the head is too long", error_status_hint=status)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """As h11's; of an answer's head nothing yet."""
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
    """One client's connection; closed if the client is late with a request's head or does not read its answer."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, *, table: ConnectionTable, door: Door | None = None
    ) -> None:
        super().__init__(config, server_state, {DOOR: door, CONNECTION: self})
        self.conn = _Messages(table.limits.head_bytes, self._write)
        self._table, self._door = table, door
        self.group = "" if door is None else door.name
        """The name of its door, or else its client's host."""
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._refused = False
        self._num_discarded = 0
        """Bytes that came behind a refusal."""
        self._num_received = self._num_payload = 0
        """Bytes of a chunked body, with its chunks' sizes and without them."""

    @property
    def is_gone(self) -> bool:
        """Whether its client will get nothing more."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the head of the first request."""
        super().connection_made(transport)
        self.group = self.group or (self.client[0] if self.client else "")
        self._read_at_once(_HEAD_AT_ONCE)
        self._table.add(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove it from the table and stop its timers."""
        self._table.remove(self)
        self._head = _cancelled(self._head)
        self._reading = _cancelled(self._reading)
        super().connection_lost(exc)
        self.app_state = {}  # it holds this connection: thousands that come and go wait for no garbage collector

    def data_received(self, data: bytes) -> None:
        """Parse new bytes, which may or may not complete a head."""
        if self._refused:
            self._num_discarded += len(data)
            if self._num_discarded > _DISCARDED:
                self.abort()
            return
        before, num_before = self.cycle, 0 if self.cycle is None else len(self.cycle.body)
        super().data_received(data)
        self._go_on(len(data), len(self.cycle.body) - num_before if self.cycle is before and self._busy else None)

    def _go_on(self, size: int, payload: int | None) -> None:
        """Read what follows, as far as it is wanted: arguments as of `_take_chunks`."""
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
        """Go on with a chunked body while its chunks are worth it: each costs as much as kilobytes of text do.

        Args:
            size: Bytes that came.
            payload: Bytes of the body in them; None: its head came with them.
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
            self.cycle.more_body = False
            self.cycle.message_event.set()
        else:
            self._read_at_once(_CHUNKS_AT_ONCE if self._num_received >= _CHUNKS_AT_ONCE else _HEAD_AT_ONCE)

    def _end_body(self) -> None:
        """Read no more of it: it is answered without its body, and then closed."""
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """The answer is written, though perhaps unread: wait for the next request, or discard the rest of a refused
        body first."""
        self._read_at_once(_BODY_AT_ONCE if self._in_body else _HEAD_AT_ONCE)
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reading()
        if not self._busy and self in self._table.open:
            self._table.waits(self)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, with the delay of every other refusal; 431 where a head is too long."""
        if not self._refused:
            self._refused = True
            self.flow.pause_reading()
            status = getattr(sys.exception(), "error_status_hint", 400)  # uvicorn is handling h11's error
            self.loop.call_later(self._table.limits.refusal_seconds, self._refuse, status, msg)

    def _refuse(self, status: int, msg: str) -> None:
        """Answer, and close once the client has read that or is late: what it still sends is discarded."""
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
        if self._busy:  # in its body: there is nobody left to answer to
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._table.waits(self)
        _cancelled(self._head)
        self._head = self.loop.call_later(_LINGER, self.abort)
        self._read_at_once(_BODY_AT_ONCE)
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """The server stops: close it once what is under way is answered."""
        if self._refused:
            self.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client does not read as fast as the answer is written."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client has read its answer."""
        super().resume_writing()
        self._reading = _cancelled(self._reading)

    def abort(self) -> None:
        """Close it now, without sending what is buffered."""
        self._table.remove(self)
        self.transport.abort()

    @property
    def _busy(self) -> bool:
        """Whether a request is unanswered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _in_body(self) -> bool:
        """Whether the client is sending the body of a request."""
        return self.conn.their_state is h11.SEND_BODY

    def _write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def _read_at_once(self, size: int) -> None:
        with contextlib.suppress(AttributeError):  # asyncio's own transports have it, uvloop's do not
            self.transport.max_size = size  # type: ignore[attr-defined]

    def _expect_head(self) -> None:
        self._table.waits(self)
        self._head = self.loop.call_later(self._table.limits.head_seconds, self._head_is_late)

    def _expect_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._table.limits.answer_seconds, self._reading_is_late)

    def _head_is_late(self) -> None:
        self._head = None
        if not self._busy:
            self.abort()

    def _reading_is_late(self) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size():
            self.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; returns None, to assign to the timer's name."""
    if timer is not None:
        timer.cancel()
    return None


class Server:
    """Serves an ASGI application over HTTP/1.1 in the caller's event loop, with uvicorn's protocol of a connection.
    It leaves signals alone: Ctrl-C belongs to the owner of the event loop.

    Args:
        app: The application.
        table: The open connections.
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
        """Accept what comes over a socket that is bound and listens."""

        def make() -> ClientConnection:
            return ClientConnection(self._config, self._state, table=self._table, door=door)

        acceptor = Acceptor(listening, make, self._table, door)
        self._acceptors.add(acceptor)
        return acceptor

    def stop_listening(self, acceptor: Acceptor) -> None:
        """Accept no more over a socket, and close it."""
        self._acceptors.discard(acceptor)
        acceptor.close()

    async def stop(self, grace: float = _GRACE) -> None:
        """Accept no more, wait so many seconds for the end of what is under way, and close connections of clients that
        read no answer."""
        for acceptor in list(self._acceptors):
            self.stop_listening(acceptor)
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110  (uvicorn's, which set no event)
                    await asyncio.sleep(_POLL)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await cancel_all(self._state.tasks)
