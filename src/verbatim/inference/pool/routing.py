"""Decides which replica gets a request: the replica that holds the episode's prefix, unless that replica is overloaded
or gone.

The obvious alternatives are worse: hashing sessions overloads a replica that happens to get long episodes, and
round-robin misses the prefix caches. This module only keeps books: it uses no clock and no randomness, and sends no
requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

MOST_SESSIONS = 65_536
"""Maximum number of remembered sessions if there are few replicas. The least recently used sessions are forgotten
first."""
SESSIONS_PER_REPLICA = 256
"""Maximum number of remembered sessions per replica if there are many replicas."""
GRAIN = 2.0**20
"""Costs are multiples of 1 / GRAIN, so that sums are exact in any order, and an idle replica's load is 0."""
OVERLOAD = 1.2
"""A replica is overloaded if its load exceeds `OVERLOAD` times the mean load plus `SLACK`."""
SLACK = 2.0
"""Added to the limit because, with few requests in flight, one more request is a large share of the load."""


@dataclass(eq=False)
class _Seat:
    """The load of one replica."""

    replica: int
    load: float = 0.0
    """Sum of the costs of the requests in flight."""
    num_running: int = 0
    """Number of requests in flight."""
    num_sessions: int = 0
    """Number of remembered sessions whose prefix the replica holds."""
    is_gone: bool = False
    """True once the replica was removed."""
    entry: _Entry | None = None
    """The replica's current entry in the heap (older entries are stale); None if the replica is full or gone."""


_Entry: TypeAlias = tuple[float, int, int, int, _Seat]
"""(load, number of sessions, replica, number of the entry, seat). The number of the entry breaks ties, so that seats
are never compared."""


@dataclass(frozen=True, eq=False)
class Admission:
    """A request's place on a replica, from `Router.take` to `Router.leave`."""

    replica: int
    cost: float
    seat: _Seat


class Router:
    """Sticky least-loaded routing.

    A request costs 1, plus its prompt's length divided by the mean prompt length; a replica's load is the cost of its
    requests in flight. The first request of a session goes to the replica with the least load and, if several have the
    same load, with the fewest sessions. Later requests of the session go to the same replica, unless it is gone or full
    or its load exceeds `OVERLOAD` times the mean load plus `SLACK`. In that case the session moves to the least loaded
    replica.

    Args:
        most_running: Maximum requests in flight on one replica.
        most_sessions: Maximum number of remembered sessions; None means `MOST_SESSIONS`, or more if there are many
            replicas.

    Example:
        >>> router = Router(most_running=8)
        >>> for replica in (0, 1):
        ...     router.add(replica)
        >>> [router.take(session, 10).replica for session in ("a", "b", "a")]
        [0, 1, 0]
    """

    def __init__(self, *, most_running: int, most_sessions: int | None = None) -> None:
        assert most_running >= 1 and (most_sessions is None or most_sessions >= 1)
        self._most_running = most_running
        self._most_sessions = most_sessions
        self._seats: dict[int, _Seat] = {}
        self._homes: OrderedDict[str, _Seat] = OrderedDict()
        self._order: list[_Entry] = []
        self._num_entries = 0
        self._load = 0.0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self.num_moved = 0
        """Number of requests that did not go to the replica that held their prefix."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that requests can go to."""
        return tuple(self._seats)

    @property
    def num_sessions(self) -> int:
        """Number of remembered sessions."""
        return len(self._homes)

    def num_running(self, replica: int) -> int:
        """Number of requests in flight on a replica; 0 if it was removed."""
        seat = self._seats.get(replica)
        return seat.num_running if seat is not None else 0

    def add(self, replica: int) -> None:
        """Let requests go to this replica, whose prefix cache is empty."""
        assert replica not in self._seats
        seat = self._seats[replica] = _Seat(replica)
        self._rank(seat)

    def remove(self, replica: int) -> None:
        """Send no more requests to this replica. Its sessions move to other replicas with their next requests."""
        seat = self._seats.pop(replica, None)
        if seat is not None:
            seat.is_gone, seat.entry = True, None
            self._load -= seat.load

    def take(self, session: str, num_prompt_tokens: int, avoid: Collection[int] = ()) -> Admission | None:
        """Assign a request to a replica.

        Args:
            session: The episode's name; "" for a request that belongs to no episode.
            num_prompt_tokens: Length of the prompt.
            avoid: Replicas that are used only if no other is available.

        Returns:
            The place, to be returned with `leave`; None if every replica is full.
        """
        least = self._least(avoid)
        if least is None:
            return None
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        cost = 1.0 + num_prompt_tokens * self._num_requests / max(1, self._num_prompt_tokens)
        cost = round(cost * GRAIN) / GRAIN
        home = self._homes.get(session)
        if home is not None and home.is_gone:
            home = None
        if home is not None and (home is least or self._may_stay(home, least, avoid)):
            chosen = home
            self._homes.move_to_end(session)
        else:
            chosen = least
            self.num_moved += home is not None
            self._settle(session, home, chosen)
        chosen.load += cost
        chosen.num_running += 1
        self._load += cost
        self._rank(chosen)
        return Admission(chosen.replica, cost, chosen)

    def leave(self, place: Admission) -> None:
        """Return the place of a request that has ended. The place's replica may have been removed meanwhile."""
        seat = place.seat
        seat.load -= place.cost
        seat.num_running -= 1
        if not seat.is_gone:
            self._load -= place.cost
            self._rank(seat)

    def _may_stay(self, home: _Seat, least: _Seat, avoid: Collection[int]) -> bool:
        """True if a session stays on its replica `home` although the replica `least` has less load."""
        if home.num_running >= self._most_running or (home.replica in avoid and least.replica not in avoid):
            return False
        return home.load <= OVERLOAD * self._load / len(self._seats) + SLACK

    def _least(self, avoid: Collection[int]) -> _Seat | None:
        """The replica with the least load that is not full. Replicas in `avoid` are used only if no other is left."""
        # A change of load pushes a new entry and leaves the old entry in the heap. Such stale entries are dropped here.
        order = self._order
        while order and order[0][4].entry is not order[0]:
            heapq.heappop(order)
        if not order:
            return None
        if not avoid or order[0][2] not in avoid:
            return order[0][4]
        live = [entry for entry in order if entry[4].entry is entry]
        return min((entry for entry in live if entry[2] not in avoid), default=order[0])[4]

    def _rank(self, seat: _Seat) -> None:
        """Update a replica's entry in the heap. A full replica has no entry."""
        if seat.num_running >= self._most_running:
            seat.entry = None
            return
        self._num_entries += 1
        seat.entry = (seat.load, seat.num_sessions, seat.replica, self._num_entries, seat)
        heapq.heappush(self._order, seat.entry)
        # Stale entries below the top stay in the heap. Rebuilding the heap from time to time bounds their number.
        if len(self._order) > 64 + 8 * len(self._seats):
            self._order = [entry for entry in self._order if entry[4].entry is entry]
            heapq.heapify(self._order)

    def _settle(self, session: str, home: _Seat | None, chosen: _Seat) -> None:
        if not session:
            return
        if home is not None:
            home.num_sessions -= 1
            self._rank(home)
        self._homes[session] = chosen
        self._homes.move_to_end(session)
        chosen.num_sessions += 1
        most = self._most_sessions or max(MOST_SESSIONS, SESSIONS_PER_REPLICA * len(self._seats))
        while len(self._homes) > most:
            forgotten = self._homes.popitem(last=False)[1]
            forgotten.num_sessions -= 1
            if not forgotten.is_gone and forgotten is not chosen:
                self._rank(forgotten)
