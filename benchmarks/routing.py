"""Simulates routing over many replicas: how many prompt tokens are found in prefix caches, and how evenly requests are
distributed.

Episodes request a turn, spend some time in their tools, and request the next turn with a longer prompt. A replica
computes the prompt tokens that are not in its cache, and samples more slowly the more requests it has. After a third of
the turns, some replicas are lost, and the requests that they were computing are sent again to different replicas. The
routing of the pool is compared with perfect stickiness (an episode leaves a replica only if that replica is lost), with
a hash of the session, and with using the replicas in turn. Prints one JSON line.

    python benchmarks/routing.py [--replicas 64] [--episodes 4096] [--turns 20] [--lost 8] [--concurrent 4096]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from verbatim.inference.pool.routing import Admission, Router

PREFILL = 20_000.0
"""Number of prompt tokens that a replica computes per second."""
STEP, STEP_PER_REQUEST = 0.012, 0.0004
"""Seconds of a decode step: a constant part (`STEP`), and a part for each request in the batch (`STEP_PER_REQUEST`)."""
TOOL_SECONDS = 1.5
"""Mean number of seconds between two turns of an episode."""


@dataclass(eq=False)
class Episode:
    """One episode. Its lengths are drawn in advance, so that they are the same for every routing."""

    session: str
    new_tokens: list[int]
    """Number of tokens that the environment adds to the prompt, by turn."""
    completions: list[int]
    """Number of sampled tokens, by turn."""
    pauses: list[float]
    """Seconds spent in tools, by turn."""
    turn: int = 0
    length: int = 0
    """Number of tokens in the turns so far."""
    cached_on: int | None = None
    """The replica that has these tokens in its cache; None if there is no such replica."""


def draw_episodes(num: int, turns: int, rng: random.Random) -> list[Episode]:
    """Draw episodes of different sizes: the completions of some are several times as long as those of others."""
    episodes = []
    for index in range(num):
        talks = rng.lognormvariate(4.5, 0.5)
        episodes.append(
            Episode(
                session=f"{index}/main",
                new_tokens=[rng.randint(300, 900), *(rng.randint(20, 400) for _ in range(turns - 1))],
                completions=[1 + int(talks * rng.lognormvariate(0, 0.7)) for _ in range(turns)],
                pauses=[rng.expovariate(1 / TOOL_SECONDS) for _ in range(turns)],
            )
        )
    return episodes


class Routing:
    """The routing of the pool. Subclasses route differently."""

    def __init__(self, replicas: int) -> None:
        self.alive = list(range(replicas))
        self.router = Router(most_running=1_000_000)
        for replica in self.alive:
            self.router.add(replica)

    def take(self, session: str, prompt: int) -> tuple[int, Admission | None]:
        """Choose the replica for a request."""
        place = self.router.take(session, prompt)
        assert place is not None
        return place.replica, place

    def leave(self, place: Admission | None) -> None:
        """Report that a request has ended."""
        if place is not None:
            self.router.leave(place)

    def lose(self, replica: int) -> None:
        """Report that a replica is lost."""
        self.alive.remove(replica)
        self.router.remove(replica)


class Perfect(Routing):
    """Perfect stickiness. An episode that is new, or whose replica was lost, goes to the replica with the fewest
    episodes."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.homes: dict[str, int] = {}
        self.counts = [0] * replicas

    def take(self, session: str, prompt: int) -> tuple[int, Admission | None]:
        home = self.homes.get(session)
        if home not in self.alive:
            home = self.homes[session] = min(self.alive, key=lambda replica: self.counts[replica])
            self.counts[home] += 1
        assert home is not None
        return home, None


class Hash(Routing):
    """Routing by a hash of the session."""

    def take(self, session: str, prompt: int) -> tuple[int, Admission | None]:
        return self.alive[zlib.crc32(session.encode()) % len(self.alive)], None


class InTurn(Routing):
    """Routing to one replica after the other."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.numbers = itertools.count()

    def take(self, session: str, prompt: int) -> tuple[int, Admission | None]:
        return self.alive[next(self.numbers) % len(self.alive)], None


@dataclass(eq=False)
class Simulation:
    """One simulated run of all episodes."""

    routing: Routing
    waiting: list[Episode]
    """The episodes that have not begun yet. One begins each time an episode ends."""
    lose_at: int
    """Number of turns, over all episodes, after which replicas are lost; -1 for never."""
    lost: int
    rng: random.Random
    now: float = 0.0
    hits: int = 0
    """Number of prompt tokens that were found in caches."""
    prompts: int = 0
    """Number of all prompt tokens."""
    busy: dict[int, float] = field(default_factory=dict)
    """For each replica, the total duration of its requests since the loss, which is proportional to its mean number of
    requests in flight."""
    _running: dict[int, int] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _done: int = 0

    def run(self, concurrent: int) -> None:
        """Begin this number of episodes at the same time, and run until all episodes have ended."""
        self.busy = dict.fromkeys(self.routing.alive, 0.0)
        self._running = dict.fromkeys(self.routing.alive, 0)
        self.waiting.reverse()
        for _ in range(min(concurrent, len(self.waiting))):
            self._ask(self.waiting.pop())
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    @property
    def imbalance(self) -> float:
        """The mean number of requests in flight on the busiest replica, divided by the average over all replicas."""
        return max(self.busy.values()) * len(self.busy) / sum(self.busy.values())

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def _ask(self, episode: Episode) -> None:
        prompt = episode.length + episode.new_tokens[episode.turn]
        replica, place = self.routing.take(episode.session, prompt)
        found = episode.length if episode.cached_on == replica else 0
        self.hits += found
        self.prompts += prompt
        self._running[replica] += 1
        drawn = episode.completions[episode.turn]
        seconds = (prompt - found) / PREFILL + drawn * (STEP + STEP_PER_REQUEST * self._running[replica])
        began = self.now
        self._after(seconds, lambda: self._end(episode, replica, place, began))

    def _end(self, episode: Episode, replica: int, place: Admission | None, began: float) -> None:
        self.routing.leave(place)
        self._running[replica] -= 1
        if replica not in self.routing.alive:  # the replica was lost meanwhile
            episode.cached_on = None
            self._ask(episode)
            return
        self.busy[replica] += self.now - began
        turn, episode.turn = episode.turn, episode.turn + 1
        episode.length += episode.new_tokens[turn] + episode.completions[turn]
        episode.cached_on = replica
        self._done += 1
        if self._done == self.lose_at:
            for victim in self.rng.sample(self.routing.alive, self.lost):
                self.routing.lose(victim)
            self.busy = dict.fromkeys(self.routing.alive, 0.0)
        if episode.turn < len(episode.completions):
            self._after(episode.pauses[turn], lambda: self._ask(episode))
        elif self.waiting:
            self._ask(self.waiting.pop())


def simulate(
    kind: type[Routing], *, replicas: int, episodes: int, turns: int, lost: int, concurrent: int, seed: int
) -> Simulation:
    """Simulate all episodes with one kind of routing."""
    rng = random.Random(seed)
    simulation = Simulation(
        routing=kind(replicas),
        waiting=draw_episodes(episodes, turns, rng),
        rng=rng,
        lost=lost,
        lose_at=episodes * turns // 3 if lost else -1,
    )
    simulation.run(concurrent)
    return simulation


def measure(**settings: int) -> Mapping[str, float]:
    """For each kind of routing, the cache hits relative to those of perfect stickiness, the imbalance, and the duration
    relative to that of perfect stickiness."""
    perfect = simulate(Perfect, **settings)
    rate = perfect.hits / perfect.prompts
    found: dict[str, float] = {"perfect_hit_rate": rate, "perfect_imbalance": perfect.imbalance}
    for kind in (Routing, Hash, InTurn):
        name, ended = "pool" if kind is Routing else kind.__name__.lower(), simulate(kind, **settings)
        found |= {
            f"{name}_hits": ended.hits / ended.prompts / rate,
            f"{name}_imbalance": ended.imbalance,
            f"{name}_seconds": ended.now / perfect.now,
        }
    return found


def time_of_a_choice(replicas: int, requests: int = 20_000) -> float:
    """The microseconds that the router takes to choose a replica."""
    router, rng = Router(most_running=256), random.Random(0)
    for replica in range(replicas):
        router.add(replica)
    places: list[Admission] = []
    began = time.perf_counter()
    for number in range(requests):
        place = router.take(f"{number % 4096}/main", rng.randint(100, 4000))
        assert place is not None
        places.append(place)
        if len(places) > 32 * replicas:
            router.leave(places.pop(rng.randrange(len(places))))
    return (time.perf_counter() - began) / requests * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (
        ("replicas", 64),
        ("episodes", 4096),
        ("turns", 20),
        ("lost", 8),
        ("concurrent", 4096),
        ("seed", 0),
    ):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = vars(parser.parse_args())
    line = {name: round(value, 3) for name, value in measure(**options).items()}
    print(
        json.dumps(
            {"benchmark": "routing", **options, **line, "choice_us": round(time_of_a_choice(options["replicas"]), 1)}
        )
    )
