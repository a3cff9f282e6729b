"""The metrics of a pool: load, cache hits and faults of its replicas."""

from __future__ import annotations

import math
from collections.abc import Callable

from verbatim.inference.pool.admission_queue import AdmissionQueue
from verbatim.inference.pool.member import Member
from verbatim.inference.pool.replica import CanSleep, ReplicaLoad
from verbatim.inference.pool.replica_supervisor import ReplicaFaultCounts

NOTHING = ReplicaLoad()
MOST_NAMED = 32
"""Maximum number of replicas whose metrics are reported one by one. If there are more replicas, only the distribution
of each metric is reported, because 1,000 replicas would make 10,000 metrics per step."""


class PoolMetrics:
    """Reads the members' metrics. Rates cover the time since the last reading.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: dict[tuple[int, int], ReplicaLoad] = {}
        """Counts at the last reading, by the replica's index and number of restarts, because a restart resets the
        counts."""
        self._read_at = clock()

    def read(self, members: list[Member], queue: AdmissionQueue, counts: ReplicaFaultCounts) -> dict[str, float]:
        """Metrics by name: `replicas/...` for the pool, and `replica/{index}/...` for each replica. With more than
        `MOST_NAMED` replicas, the metrics of each replica are replaced by minimum, mean and maximum over the replicas:
        `replicas/{figure}/min`, `/mean` and `/max`."""
        now = self._clock()
        seconds, self._read_at = now - self._read_at, now
        metrics: dict[str, float] = {
            "replicas/serving": sum(member.state == "serving" for member in members),
            "replicas/restarts": sum(member.num_restarts for member in members),
            "replicas/lost": counts.lost,
            "replicas/failed_checks": counts.failed_checks,
            "replicas/requests_waiting": queue.num_waiting,
            "replicas/requests_moved": queue.router.num_moved,
            "replicas/requests_failed": counts.faults,
            "replicas/requests_resent": counts.resent,
            "replicas/requests_lost": counts.unknown,
            "replicas/tokens_lost": counts.lost_tokens,
        }
        figures = {member.index: self._of(member, queue, seconds) for member in members}
        if len(members) > MOST_NAMED:
            return metrics | _distribution(list(figures.values()))
        for index, own in figures.items():
            metrics |= {f"replica/{index}/{name}": value for name, value in own.items()}
        return metrics

    def _of(self, member: Member, queue: AdmissionQueue, seconds: float) -> dict[str, float]:
        load, start = member.load, (member.index, member.num_restarts)
        figures: dict[str, float] = {
            "serving": float(member.state == "serving"),
            "in_flight": queue.router.num_running(member.index),
            "policy_version": member.incarnation.version,
            "restarts": member.num_restarts,
            "unverified_tensors": member.replica.num_unverified,
        }
        if isinstance(member.replica, CanSleep) and member.replica.seconds_waking is not None:
            figures["waking_seconds"] = member.replica.seconds_waking
        if load is None:
            return figures
        since = self._before.get(start, NOTHING)
        self._before[start] = load
        queries = load.cache_queries - since.cache_queries
        tokens = load.generated_tokens - since.generated_tokens
        return figures | {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "prefix_cache_hit_rate": (load.cache_hits - since.cache_hits) / queries if queries else math.nan,
            "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        }


def _distribution(figures: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for own in figures for name in own)
    metrics: dict[str, float] = {}
    for name in names:
        values = [own[name] for own in figures if not math.isnan(own.get(name, math.nan))]
        if values:
            metrics[f"replicas/{name}/min"] = min(values)
            metrics[f"replicas/{name}/mean"] = math.fsum(values) / len(values)
            metrics[f"replicas/{name}/max"] = max(values)
    return metrics
