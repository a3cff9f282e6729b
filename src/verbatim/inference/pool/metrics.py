"""The metrics of a pool: how busy each replica is, what its cache gives, what went wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from verbatim.inference.pool.base import CanSleep, ReplicaLoad
from verbatim.inference.pool.member import Member
from verbatim.inference.pool.places import Places
from verbatim.inference.pool.roster import Counts

NOTHING = ReplicaLoad()


@dataclass(frozen=True)
class _Before:
    """A replica's counts at the last reading."""

    load: ReplicaLoad
    num_restarts: int


class PoolMetrics:
    """Reads the members; rates are since the reading before.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: dict[int, _Before] = {}
        self._read_at = clock()

    def read(self, members: list[Member], places: Places, counts: Counts) -> dict[str, float]:
        """By name: `replicas/...` of all, `replica/{index}/...` of each."""
        now = self._clock()
        seconds, self._read_at = now - self._read_at, now
        metrics: dict[str, float] = {
            "replicas/serving": sum(member.state == "serving" for member in members),
            "replicas/restarts": sum(member.num_restarts for member in members),
            "replicas/lost": counts.lost,
            "replicas/failed_checks": counts.failed_checks,
            "replicas/requests_waiting": places.num_waiting,
            "replicas/requests_moved": places.router.num_moved,
            "replicas/requests_failed": counts.faults,
            "replicas/requests_resent": counts.resent,
            "replicas/requests_lost": counts.unknown,
            "replicas/tokens_lost": counts.lost_tokens,
        }
        for member in members:
            metrics |= self._of(member, places, seconds)
        return metrics

    def _of(self, member: Member, places: Places, seconds: float) -> dict[str, float]:
        load, before = member.load, self._before.get(member.index)
        named = f"replica/{member.index}"
        metrics: dict[str, float] = {
            f"{named}/serving": float(member.state == "serving"),
            f"{named}/in_flight": places.router.num_running(member.index),
            f"{named}/policy_version": member.life.version,
            f"{named}/restarts": member.num_restarts,
            f"{named}/unverified_tensors": member.replica.num_unverified,
        }
        if isinstance(member.replica, CanSleep) and member.replica.seconds_waking is not None:
            metrics[f"{named}/waking_seconds"] = member.replica.seconds_waking
        if load is None:
            return metrics
        since = before.load if before is not None and before.num_restarts == member.num_restarts else NOTHING
        self._before[member.index] = _Before(load, member.num_restarts)
        queries = load.cache_queries - since.cache_queries
        tokens = load.generated_tokens - since.generated_tokens
        return metrics | {
            f"{named}/running": load.running,
            f"{named}/waiting": load.waiting,
            f"{named}/kv_usage": load.kv_usage,
            f"{named}/prefix_cache_hit_rate": (load.cache_hits - since.cache_hits) / queries if queries else math.nan,
            f"{named}/tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        }
