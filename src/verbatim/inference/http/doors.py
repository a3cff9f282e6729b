"""Counts the connections of a server, in all and of each client or door, so that one leaves the others room."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from verbatim.inference.http.limits import ConnectionLimits

_AT_ONCE = 64
"""Connections of a door that are accepted at once after a quiet while."""


class Pace:
    """So many things a second, and some at once: one client that does them without end leaves the others theirs.

    Args:
        per_second: In the long run.
        burst: At once, after a quiet while.
        now: The clock, in seconds.
    """

    def __init__(self, per_second: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._apart, self._burst, self._now = 1 / per_second, burst / per_second, now
        self._due = 0.0
        """When the next thing would be due if all were spread evenly."""

    def delay(self) -> float:
        """Count one thing; returns the seconds that it has to wait.

        >>> pace = Pace(10, 2, now=lambda: 5.0)
        >>> [round(pace.delay(), 3) for _ in range(4)]
        [0.0, 0.0, 0.1, 0.2]
        """
        now = self._now()
        self._due = max(self._due, now) + self._apart
        return max(0.0, self._due - now - self._burst)


class OpenConnection(Protocol):
    """An open connection."""

    group: str
    """Its door's name, or else its client's host."""

    def abort(self) -> None:
        """Close it now."""


@dataclass(eq=False)
class Door:
    """A socket of its own for clients that are not trusted with the whole server: a program in its sandbox."""

    name: str
    most: int
    """Most open connections. A new one replaces the one that has waited longest for a request."""
    per_second: float
    """Most connections, and most requests, in a second; others wait."""
    accepts: Pace = field(init=False)
    requests: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.accepts = Pace(self.per_second, _AT_ONCE)
        self.requests = Pace(self.per_second, self.most)


class ConnectionTable:
    """Open connections, and those of them that wait for a request, the longest wait first. The connections of a door,
    or else of a client's host, are a group.

    Args:
        limits: Of one connection.
        most: Most open connections.
    """

    def __init__(self, limits: ConnectionLimits, most: int) -> None:
        self.limits, self.most = limits, most
        self.open: set[OpenConnection] = set()
        self.num_queued = 0
        """Connections that are accepted and not begun."""
        self._waiting: dict[str, dict[OpenConnection, None]] = {}
        self._sizes: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for a newcomer."""
        return len(self.open) + self.num_queued >= self.most

    def num_of(self, group: str) -> int:
        """Open connections of a group."""
        return self._sizes[group]

    def add(self, connection: OpenConnection) -> None:
        """It is open."""
        self.open.add(connection)
        self._sizes[connection.group] += 1

    def remove(self, connection: OpenConnection) -> None:
        """It is closed. May be called again."""
        self.has_request(connection)
        if connection in self.open:
            self.open.remove(connection)
            self._sizes[connection.group] -= 1
            if not self._sizes[connection.group]:
                del self._sizes[connection.group]

    def waits(self, connection: OpenConnection) -> None:
        """It waits for a request from now on, if it did not before."""
        self._waiting.setdefault(connection.group, {}).setdefault(connection)

    def has_request(self, connection: OpenConnection) -> None:
        """It waits no longer."""
        group = self._waiting.get(connection.group)
        if group is not None:
            group.pop(connection, None)
            if not group:
                del self._waiting[connection.group]

    def evict(self, group: str | None = None) -> bool:
        """Close the connection that has waited longest for a request: of this group, or of the one that has most of
        them. False if all have a request."""
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
