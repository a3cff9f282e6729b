"""Accepts connections while there is room for them.

asyncio's own acceptor takes whatever comes, and logs thousands of tracebacks where the process has no descriptor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
import time
from collections.abc import Callable

from verbatim.inference.http.doors import ConnectionTable, Door

logger = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE, _BEGUN_AT_ONCE = 1024, 64
"""Most connections accepted, and begun, in one turn of the event loop; requests under way run in between."""
_HEALTH = b"GET /health "
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LOG_INTERVAL = 60.0
"""Seconds between two log lines about the same problem."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s"
)
_FULL_BODY = b'{"error": {"message": "too many connections; try again", "type": "unavailable", "code": 503}}'


class Acceptor:
    """Accepts connections while there is room in the table and a free descriptor.

    A connection is accepted as soon as it comes and then waits for its turn: a few begin in each turn of the event
    loop, and health checks begin first. So a health check never waits behind thousands of requests.

    Args:
        listening: A socket that is bound and listens.
        make: Creates the protocol of a connection.
        table: The open connections.
        door: Limits what comes over this socket; None: the whole table may.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        table: ConnectionTable,
        door: Door | None = None,
    ) -> None:
        self.listening = listening
        """The socket; closed by its owner."""
        self._door = door
        self._make = make
        self._table = table
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
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self.listening.fileno())
        if self._beginning is not None:
            self._beginning.cancel()
        for connection in list(self._queue):
            self._take(connection)
            connection.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self.listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionAbortedError:  # the client closed it already
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._table.evict()
                self._log("no more connections can be accepted for now: %s", error.strerror)
                self._rest(self._pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                break
            self._pause = _FIRST_PAUSE
            connection.setblocking(False)
            if not self._makes_room():
                self._turn_away(connection)
                self._rest_at_door()
                break
            self._queue[connection] = None
            self._silent.add(connection)
            self._table.num_queued += 1
            if self._rest_at_door():
                break
        if self._queue and self._beginning is None:
            self._begin()

    def _makes_room(self) -> bool:
        """Whether there is room for one more, if need be in the place of one without a request."""
        door, table = self._door, self._table
        if door is not None and table.num_of(door.name) + len(self._queue) >= door.most and not table.evict(door.name):
            return False
        return not table.is_full or table.evict()

    def _take(self, connection: socket.socket) -> None:
        """Take a connection out of the queue."""
        del self._queue[connection]
        self._silent.discard(connection)
        self._table.num_queued -= 1

    def _begin(self) -> None:
        """Begin some queued connections: every health check, and the oldest others."""
        first = [connection for connection in list(self._silent) if self._look(connection)]
        for connection in [*first, *itertools.islice(self._queue, _BEGUN_AT_ONCE)]:
            if connection not in self._queue:
                continue
            self._take(connection)
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
            self._take(connection)
            connection.close()
        return start == _HEALTH

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError:  # the client closed it meanwhile
            connection.close()

    def _turn_away(self, connection: socket.socket) -> None:
        """Answer a newcomer with 503: every open connection has a request under way."""
        with contextlib.suppress(OSError), connection:
            connection.send(_FULL % (len(_FULL_BODY), _FULL_BODY))
        most = self._table.most if self._door is None else min(self._table.most, self._door.most)
        self._log("all %d connections have a request under way; newcomers are answered with 503", most)

    def _rest_at_door(self) -> bool:
        """Pause where more comes through the door than may in a while; returns whether it does."""
        delay = 0.0 if self._door is None else self._door.accepts.delay()
        if delay:
            self._rest(delay)
        return delay > 0

    def _rest(self, seconds: float) -> None:
        """Accept again after a pause."""
        self._loop.remove_reader(self.listening.fileno())
        self._again = self._loop.call_later(seconds, self._loop.add_reader, self.listening.fileno(), self._accept)

    def _log(self, text: str, *about: object) -> None:
        now = time.monotonic()
        if now - self._last_logged >= _LOG_INTERVAL:
            self._last_logged = now
            logger.warning(text, *about)
