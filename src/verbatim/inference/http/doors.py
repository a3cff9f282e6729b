"""Counts the connections of a server, in all and of each client or door, so that one leaves the others room."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from verbatim.inference.http.limits import ConnectionLimits
from verbatim.inference.http.pace import Pace

_AT_ONCE = 64
"""Connections of a door that are accepted at once after a quiet while."""


class Connection(Protocol):
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
        self.open: set[Connection] = set()
        self.num_queued = 0
        """Connections that are accepted and not begun."""
        self._waiting: dict[str, dict[Connection, None]] = {}
        self._sizes: Counter[str] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for a newcomer."""
        return len(self.open) + self.num_queued >= self.most

    def num_of(self, group: str) -> int:
        """Open connections of a group."""
        return self._sizes[group]

    def add(self, connection: Connection) -> None:
        """It is open."""
        self.open.add(connection)
        self._sizes[connection.group] += 1

    def remove(self, connection: Connection) -> None:
        """It is closed. May be called again."""
        self.has_request(connection)
        if connection in self.open:
            self.open.remove(connection)
            self._sizes[connection.group] -= 1
            if not self._sizes[connection.group]:
                del self._sizes[connection.group]

    def waits(self, connection: Connection) -> None:
        """It waits for a request from now on, if it did not before."""
        self._waiting.setdefault(connection.group, {}).setdefault(connection)

    def has_request(self, connection: Connection) -> None:
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
