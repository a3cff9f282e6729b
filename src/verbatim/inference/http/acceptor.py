"""Accepts connections while there is room for them.

asyncio's own acceptor has no limit, and logs thousands of tracebacks when the process runs out of file descriptors.
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
"""Maximum number of connections that are accepted, and that are begun, in one pass of the event loop. Requests in
flight run between passes."""
_HEALTH = b"GET /health "
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of `accept` that mean that the system is out of descriptors or memory."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds for which nothing is accepted after an error in `_EXHAUSTED`: the first pause, which is doubled after each
further error, and the longest pause."""
_LOG_INTERVAL = 60.0
"""Minimum seconds between two log lines."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s"
)
_FULL_BODY = b'{"error": {"message": "too many connections; try again", "type": "unavailable", "code": 503}}'


class Acceptor:
    """Accepts connections while there is room in the table and a free descriptor.

    Connections are accepted immediately and then queued. A few of them begin in each pass of the event loop, health
    checks first, so that a health check never waits behind thousands of requests.

    Args:
        listening: A socket that is bound and listening.
        make: Creates the protocol of a connection.
        table: Table of the open connections.
        door: Limits of this socket; None if only the table's limit applies.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        table: ConnectionTable,
        door: Door | None = None,
    ) -> None:
        self.listening = listening
        """The listening socket; its owner closes it."""
        self._door = door
        self._make = make
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._pause = _FIRST_PAUSE
        self._again: asyncio.TimerHandle | None = None
        self._last_logged = -_LOG_INTERVAL
        self._queue: dict[socket.socket, None] = {}
        self._silent: set[socket.socket] = set()
        """Queued connections that have not sent anything yet. Each of them may turn out to be a health check."""
        self._beginning: asyncio.Handle | None = None
        self._connecting: set[asyncio.Task[None]] = set()  # asyncio itself holds only weak references to tasks
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting, and close queued connections."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self.listening.fileno())
        if self._beginning is not None:
            self._beginning.cancel()
        for connection in list(self._queue):
            self._take(connection)
            connection.close()

    def _accept(self) -> None:
        """Accept connections from the backlog while there is room. Called when the socket is readable."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self.listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionAbortedError:  # the client has already closed it
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._table.evict()  # closing an idle connection frees a descriptor
                self._log("no more connections can be accepted for now: %s", error.strerror)
                self._pause_accepting(self._pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                break
            self._pause = _FIRST_PAUSE
            connection.setblocking(False)
            if not self._makes_room():
                self._turn_away(connection)
                self._pause_at_door()
                break  # let the event loop run before the next connection, because a request may end meanwhile
            self._queue[connection] = None
            self._silent.add(connection)
            self._table.num_queued += 1
            if self._pause_at_door():
                break
        if self._queue and self._beginning is None:
            self._begin()

    def _makes_room(self) -> bool:
        """Close an idle connection if there is no room for a new connection. Returns False if there is still no
        room."""
        door, table = self._door, self._table
        if door is not None and table.num_of(door.name) + len(self._queue) >= door.most and not table.evict(door.name):
            return False
        return not table.is_full or table.evict()

    def _take(self, connection: socket.socket) -> None:
        """Remove a connection from the queue."""
        del self._queue[connection]
        self._silent.discard(connection)
        self._table.num_queued -= 1

    def _begin(self) -> None:
        """Begin every queued health check and the oldest other connections. Reschedules itself until the queue is
        empty."""
        first = [connection for connection in list(self._silent) if self._is_health_check(connection)]
        for connection in [*first, *itertools.islice(self._queue, _BEGUN_AT_ONCE)]:
            if connection not in self._queue:  # a health check may also be among the oldest connections
                continue
            self._take(connection)
            connecting = self._loop.create_task(self._connect(connection))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)
        self._beginning = self._loop.call_soon(self._begin) if self._queue else None

    def _is_health_check(self, connection: socket.socket) -> bool:
        """True if a queued connection is a health check. Removes a connection that the client has closed."""
        try:  # peek, so that the connection's protocol still gets the bytes
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
        except OSError:  # the client has closed the connection
            connection.close()

    def _turn_away(self, connection: socket.socket) -> None:
        """Answer a new connection with 503, because every open connection has a request in flight."""
        with contextlib.suppress(OSError), connection:
            connection.send(_FULL % (len(_FULL_BODY), _FULL_BODY))
        most = self._table.most if self._door is None else min(self._table.most, self._door.most)
        self._log("all %d connections have a request in flight; new ones get a 503", most)

    def _pause_at_door(self) -> bool:
        """Pause accepting if the door's connection rate is exceeded. Returns True if paused."""
        delay = 0.0 if self._door is None else self._door.accepts.delay()
        if delay:
            self._pause_accepting(delay)
        return delay > 0

    def _pause_accepting(self, seconds: float) -> None:
        """Stop accepting for a while. The event loop must not watch the socket meanwhile, because the socket stays
        readable."""
        self._loop.remove_reader(self.listening.fileno())
        self._again = self._loop.call_later(seconds, self._loop.add_reader, self.listening.fileno(), self._accept)

    def _log(self, text: str, *about: object) -> None:
        now = time.monotonic()
        if now - self._last_logged >= _LOG_INTERVAL:
            self._last_logged = now
            logger.warning(text, *about)
