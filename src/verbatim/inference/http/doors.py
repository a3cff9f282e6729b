"""Tracks a server's open connections, in total, per client and per listening socket, so that no client can use up the
share of the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from verbatim.inference.http.limits import ConnectionLimits

_AT_ONCE = 64
"""Number of connections that a door accepts in a burst after a quiet period."""


class Pace:
    """A rate limiter with a burst (the generic cell rate algorithm, a form of token bucket).

    Args:
        per_second: Events per second in the long run.
        burst: Number of events that are allowed without delay after a quiet period.
        now: Returns the time in seconds.
    """

    def __init__(self, per_second: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._apart, self._burst, self._now = 1 / per_second, burst / per_second, now
        self._due = 0.0
        """Time at which the next event would be due if events were evenly spaced."""

    def delay(self) -> float:
        """Count one event. Returns the number of seconds that the event has to wait.

        >>> pace = Pace(10, 2, now=lambda: 5.0)
        >>> [round(pace.delay(), 3) for _ in range(4)]
        [0.0, 0.0, 0.1, 0.2]
        """
        now = self._now()
        self._due = max(self._due, now) + self._apart
        return max(0.0, self._due - now - self._burst)


class OpenConnection(Protocol):
    """What the table needs to know about an open connection, and to do with it."""

    group: str
    """Name of the connection's door, or else the client's host."""

    def abort(self) -> None:
        """Close the connection immediately."""


@dataclass(eq=False)
class Door:
    """Limits of a separate listening socket for untrusted clients, such as a program in a sandbox."""

    name: str
    most: int
    """Maximum number of open connections. A further connection replaces the connection that has been idle longest."""
    per_second: float
    """Maximum number of new connections, and of requests, per second. Further connections and requests wait."""
    accepts: Pace = field(init=False)
    """Rate limiter for new connections."""
    requests: Pace = field(init=False)
    """Rate limiter for requests."""

    def __post_init__(self) -> None:
        self.accepts = Pace(self.per_second, _AT_ONCE)
        self.requests = Pace(self.per_second, self.most)


class ConnectionTable:
    """The open connections, and which of them are idle. The connections of one door form a group. Connections without a
    door are grouped by the client's host.

    Args:
        limits: Limits of one connection.
        most: Maximum number of open connections.
    """

    def __init__(self, limits: ConnectionLimits, most: int) -> None:
        self.limits, self.most = limits, most
        self.open: set[OpenConnection] = set()
        self.num_queued = 0
        """Number of connections that are accepted but have not begun."""
        self._waiting: dict[str, dict[OpenConnection, None]] = {}
        """Idle connections by group. The inner dict serves as an ordered set, in which the connection that has been
        idle longest is first."""
        self._sizes: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """True if there is no room for another connection."""
        return len(self.open) + self.num_queued >= self.most

    def num_of(self, group: str) -> int:
        """Number of open connections of a group."""
        return self._sizes[group]

    def add(self, connection: OpenConnection) -> None:
        """Record an opened connection."""
        self.open.add(connection)
        self._sizes[connection.group] += 1

    def remove(self, connection: OpenConnection) -> None:
        """Record a closed connection. May be called repeatedly."""
        self.has_request(connection)
        if connection in self.open:
            self.open.remove(connection)
            self._sizes[connection.group] -= 1
            if not self._sizes[connection.group]:
                del self._sizes[connection.group]

    def waits(self, connection: OpenConnection) -> None:
        """Record that a connection is idle. A connection that is already idle keeps its place in the order."""
        self._waiting.setdefault(connection.group, {}).setdefault(connection)

    def has_request(self, connection: OpenConnection) -> None:
        """Record that a connection is no longer idle."""
        group = self._waiting.get(connection.group)
        if group is not None:
            group.pop(connection, None)
            if not group:
                del self._waiting[connection.group]

    def evict(self, group: str | None = None) -> bool:
        """Close the connection of this group that has been idle longest. If `group` is None, the group with the most
        idle connections is used. Returns False if there is no idle connection."""
        if group is None:
            group = max(self._waiting, key=lambda name: len(self._waiting[name]), default=None)
        for connection in self._waiting.get(group or "", ()):
            connection.abort()
            return True
        return False

    def close(self, group: str) -> None:
        """Close all connections of a group."""
        for connection in [one for one in self.open if one.group == group]:
            connection.abort()
