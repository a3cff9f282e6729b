"""Decides which replica gets a request: the one that holds the episode's prefix, unless it is overloaded or gone.

A hash of the session would keep replicas hot that got the long episodes, and sending requests in turn would find no
prefix in any cache. Pure bookkeeping: no clock, no requests, no randomness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

MOST_SESSIONS = 65_536
"""Sessions that are remembered; those that asked longest ago are forgotten first."""
OVERLOAD = 1.2
"""A replica is overloaded beyond this share of the mean load..."""
SLACK = 2.0
"""...and this much more: with few requests in flight, shares say little."""


@dataclass(eq=False)
class _Seat:
    """What a replica has to do."""

    load: float = 0.0
    """Sum of the costs of its requests in flight."""
    num_running: int = 0
    """Requests in flight."""
    num_sessions: int = 0
    """Remembered sessions whose prefix it holds."""


@dataclass(frozen=True, eq=False)
class Place:
    """A request's place on a replica, from `Router.take` to `Router.leave`."""

    replica: int
    cost: float
    seat: _Seat


class Router:
    """Sticky least-loaded routing.

    The load of a replica is the cost of its requests in flight: 1 for each, and 1 more for a prompt as long as the mean
    prompt. The first request of a session goes to the replica with the least load, and to the one with fewer sessions
    where loads are equal. Later ones follow it, unless that replica is gone or full, or has more than `OVERLOAD` times
    the mean load and `SLACK`: then the session moves to the least loaded one.

    Args:
        most_running: Most requests in flight on one replica.
        most_sessions: Sessions that are remembered.

    Example:
        >>> router = Router(most_running=8)
        >>> for replica in (0, 1):
        ...     router.add(replica)
        >>> [router.take(session, 10).replica for session in ("a", "b", "a")]
        [0, 1, 0]
    """

    def __init__(self, *, most_running: int, most_sessions: int = MOST_SESSIONS) -> None:
        assert most_running >= 1 and most_sessions >= 1
        self._most_running = most_running
        self._most_sessions = most_sessions
        self._seats: dict[int, _Seat] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self.num_moved = 0
        """Requests that went to another replica than the one that held their prefix."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that requests can go to."""
        return tuple(self._seats)

    @property
    def num_sessions(self) -> int:
        """Sessions that are remembered."""
        return len(self._homes)

    def num_running(self, replica: int) -> int:
        """Requests in flight on a replica."""
        seat = self._seats.get(replica)
        return seat.num_running if seat is not None else 0

    def add(self, replica: int) -> None:
        """Requests can go to this replica, whose cache is empty."""
        assert replica not in self._seats
        self._seats[replica] = _Seat()

    def remove(self, replica: int) -> None:
        """No request goes to this replica any more; its sessions move when they ask again."""
        self._seats.pop(replica, None)
        for session in [session for session, home in self._homes.items() if home == replica]:
            del self._homes[session]

    def take(self, session: str, num_prompt_tokens: int, avoid: Collection[int] = ()) -> Place | None:
        """A place for a request; None if every replica is full.

        Args:
            session: Names the episode; "" names no episode.
            num_prompt_tokens: Length of the prompt.
            avoid: Replicas that are taken only where there is no other.
        """
        free = {r: seat for r, seat in self._seats.items() if seat.num_running < self._most_running}
        free = {r: seat for r, seat in free.items() if r not in avoid} or free
        if not free:
            return None
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        cost = 1.0 + num_prompt_tokens * self._num_requests / max(1, self._num_prompt_tokens)
        home = self._homes.get(session)
        if home is None or home not in free or self._is_overloaded(home):
            chosen = min(free, key=lambda replica: (free[replica].load, free[replica].num_sessions, replica))
            self.num_moved += home is not None and home != chosen
            self._settle(session, home, chosen)
        else:
            chosen = home
            self._homes.move_to_end(session)
        seat = free[chosen]
        seat.load += cost
        seat.num_running += 1
        return Place(chosen, cost, seat)

    def leave(self, place: Place) -> None:
        """The request has ended; its replica may be gone."""
        place.seat.load -= place.cost
        place.seat.num_running -= 1
        if not place.seat.num_running:
            place.seat.load = 0.0  # sums of floats drift

    def _is_overloaded(self, replica: int) -> bool:
        mean = sum(seat.load for seat in self._seats.values()) / len(self._seats)
        return self._seats[replica].load > OVERLOAD * mean + SLACK

    def _settle(self, session: str, home: int | None, chosen: int) -> None:
        if not session:
            return
        if home is not None:
            self._seats[home].num_sessions -= 1
        self._homes[session] = chosen
        self._homes.move_to_end(session)
        self._seats[chosen].num_sessions += 1
        while len(self._homes) > self._most_sessions:
            _, forgotten = self._homes.popitem(last=False)
            self._seats[forgotten].num_sessions -= 1
