"""Limits the connections of a sampler's server, and closes those that a client holds idle.

uvicorn has no deadline for the head of a request or for a client that does not read, and asyncio's own acceptor logs
thousands of tracebacks where the process has no descriptor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from verbatim.inference.http.limits import ServerLimits

logger = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE, _BEGUN_AT_ONCE = 1024, 64
"""Most connections accepted, and begun, in one turn of the event loop; requests under way run in between."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients do, so that none is closed as a request arrives."""
_GRACE = 5
"""Seconds for requests under way to be answered when the server stops."""
_HEALTH = b"GET /health "
_HEAD_AT_ONCE, _BODY_AT_ONCE = 2**12, 2**18
"""Most bytes read in one turn. A body of known length is passed on as it comes; a head may be followed by thousands
of tiny chunks, which are parsed one by one."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LOG_INTERVAL = 60.0
"""Seconds between two log lines about the same problem."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s"
)
_FULL_BODY = b'{"error": {"message": "too many connections; try again", "type": "unavailable", "code": 503}}'


class ConnectionTable:
    """Open connections, and those of them that wait for a request, the longest wait first."""

    def __init__(self, limits: ServerLimits, most: int) -> None:
        self.limits = limits
        self.most = most
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}

    def evict(self) -> bool:
        """Close the connection that has waited longest for a request; False if all have one."""
        for connection in self.waiting:
            connection.abort()
            return True
        return False


class Connection(H11Protocol):
    """One client's connection; closed if the client is late with a request's head or does not read its answer."""

    def __init__(self, *args: Any, table: ConnectionTable, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the head of the first request."""
        super().connection_made(transport)
        self._read_at_once(_HEAD_AT_ONCE)
        self._table.open.add(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove it from the table and stop its timers."""
        self._table.open.discard(self)
        self._table.waiting.pop(self, None)
        self._head = _cancelled(self._head)
        self._reading = _cancelled(self._reading)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse new bytes, which may or may not complete a head."""
        super().data_received(data)
        if self._busy:
            self._head = _cancelled(self._head)
            self._table.waiting.pop(self, None)
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                self.flow.pause_reading()  # it is answered without its body, and then closed
                self.cycle.keep_alive = False
            else:
                self._read_at_once(_BODY_AT_ONCE)
        elif not self.transport.is_closing():
            if not self._in_body:
                self._read_at_once(_HEAD_AT_ONCE)
            if self._head is None:
                self._expect_head()

    def on_response_complete(self) -> None:
        """The answer is written, though perhaps unread: wait for the next request, or discard the rest of a refused
        body first."""
        self._read_at_once(_BODY_AT_ONCE if self._in_body else _HEAD_AT_ONCE)
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_reading()
        if not self._busy and self in self._table.open:
            self._table.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, with the delay of every other refusal."""
        if not self._refused:
            self._refused = True
            self.flow.pause_reading()
            self.loop.call_later(self._table.limits.refusal_seconds, self._refuse, msg)

    def _refuse(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

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
        self._table.waiting.pop(self, None)
        self.transport.abort()

    @property
    def _busy(self) -> bool:
        """Whether a request is unanswered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _in_body(self) -> bool:
        """Whether the client is sending the body of a request."""
        return self.conn.their_state is h11.SEND_BODY

    def _read_at_once(self, size: int) -> None:
        with contextlib.suppress(AttributeError):  # asyncio's own transports have it, uvloop's do not
            self.transport.max_size = size  # type: ignore[attr-defined]

    def _expect_head(self) -> None:
        self._table.waiting[self] = None
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


class Acceptor:
    """Accepts connections while there is room in the table and a free descriptor.

    A connection is accepted as soon as it comes and then waits for its turn: a few begin in each turn of the event
    loop, and health checks begin first. So a health check never waits behind thousands of requests.

    Args:
        listening: A socket that is bound and listens.
        make: Creates the protocol of a connection.
        table: The open connections.
        tls: The certificate of https; None is http.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        table: ConnectionTable,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listening = listening
        self._make = make
        self._table = table
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._pause = _FIRST_PAUSE
        self._again: asyncio.TimerHandle | None = None
        self._last_logged = -_LOG_INTERVAL
        self._queue: dict[socket.socket, None] = {}
        self._silent: set[socket.socket] = set()
        """Connections in the queue that have sent nothing so far."""
        self._beginning: asyncio.Handle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; close queued connections."""
        self._again = _cancelled(self._again)
        self._loop.remove_reader(self._listening.fileno())
        if self._beginning is not None:
            self._beginning.cancel()
        for connection in self._queue:
            connection.close()
        self._queue.clear()
        self._silent.clear()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._num_connections >= self._table.most and not self._table.evict():
                self._turn_away()
                break
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionAbortedError:  # the client closed it already
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._table.evict()
                self._wait(error)
                break
            self._pause = _FIRST_PAUSE
            connection.setblocking(False)
            self._queue[connection] = None
            self._silent.add(connection)
        if self._queue and self._beginning is None:
            self._begin()

    @property
    def _num_connections(self) -> int:
        """Those in the queue too, and those whose TLS handshake is under way."""
        num_handshakes = 0 if self._tls is None else len(self._connecting)
        return len(self._table.open) + len(self._queue) + num_handshakes

    def _begin(self) -> None:
        """Begin some queued connections: every health check, and the oldest others."""
        first = [connection for connection in list(self._silent) if self._look(connection)]
        for connection in [*first, *itertools.islice(self._queue, _BEGUN_AT_ONCE)]:
            if connection not in self._queue:
                continue
            del self._queue[connection]
            self._silent.discard(connection)
            connecting = self._loop.create_task(self._connect(connection))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)
        self._beginning = self._loop.call_soon(self._begin) if self._queue else None

    def _look(self, connection: socket.socket) -> bool:
        """Whether a connection in the queue is a health check. Removes a connection that the client has closed."""
        try:
            start = connection.recv(len(_HEALTH), socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            start = b""
        self._silent.discard(connection)
        if not start:
            del self._queue[connection]
            connection.close()
        return start == _HEALTH

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._table.limits.head_seconds,
            )
        except OSError:  # the client closed it meanwhile
            connection.close()

    def _turn_away(self) -> None:
        """Answer a newcomer with 503: every open connection has a request under way."""
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            with connection:
                connection.setblocking(False)
                connection.send(_FULL % (len(_FULL_BODY), _FULL_BODY))
            self._log("all %d connections have a request under way; newcomers are answered with 503", self._table.most)

    def _wait(self, error: OSError) -> None:
        """Accept again after a pause, because the system has no free descriptor; log it once a minute."""
        self._log("no more connections can be accepted for now: %s", error.strerror)
        self._loop.remove_reader(self._listening.fileno())
        self._again = self._loop.call_later(self._pause, self._loop.add_reader, self._listening.fileno(), self._accept)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _log(self, text: str, *about: object) -> None:
        now = time.monotonic()
        if now - self._last_logged >= _LOG_INTERVAL:
            self._last_logged = now
            logger.warning(text, *about)


class Server(uvicorn.Server):
    """A uvicorn server that accepts connections through an `Acceptor`, in the caller's event loop.

    Args:
        app: The ASGI application.
        listening: A socket that is bound and listens.
        table: The open connections.
        tls: The certificate of https; None is http.
    """

    def __init__(
        self, app: ASGIApp, listening: socket.socket, table: ConnectionTable, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="error",
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_GRACE,
            )
        )
        make = functools.partial(
            Connection, config=self.config, server_state=self.server_state, app_state={}, table=table
        )
        self._acceptor = Acceptor(listening, make, table, tls)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The `Acceptor` listens already, in place of asyncio's."""
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end what is open."""
        self._acceptor.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: Ctrl-C belongs to the owner of the event loop."""
        yield

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Stop accepting, wait for the end of the task, and close connections of clients that read no answer."""
        self.should_exit = True
        await asyncio.shield(running)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
