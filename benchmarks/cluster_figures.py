"""Computes the figures of a simulated run, for any period between two moments and for the measured steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_simulation import Mark, Simulation


def memory() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def of_stretch(simulation: Simulation, first: Mark, last: Mark) -> dict[str, float]:
    """The figures of the period between two moments."""
    seconds, turns = max(1e-9, last.at - first.at), last.turns - first.turns
    code = last.code - first.code
    return {
        "share_of_ideal": (last.drawn - first.drawn) / seconds / simulation.ideal,
        "turns_per_second": turns / seconds,
        "episodes_per_second": (last.episodes - first.episodes) / seconds,
        "servers_busy": (last.busy - first.busy) / seconds / simulation.setting.servers,
        "messages_per_second": (last.messages - first.messages) / seconds,
        "core_used": code / seconds,
        "microseconds_per_turn": code / max(1, turns) * 1e6,
        "threads_used": (last.threads - first.threads) / seconds,
        "wire_used": (last.wire - first.wire) / seconds,
        "collecting_used": (last.collecting - first.collecting) / seconds,
    }


def figures(simulation: Simulation, memory_used: int) -> dict[str, Any]:
    """All figures of a row of the table, for the measured steps."""
    setting, notes = simulation.setting, simulation.notes
    measured = slice(setting.warm_up, setting.warm_up + setting.steps)
    first, last = notes.marks[setting.warm_up - 1], notes.marks[measured][-1]
    seconds = last.at - first.at
    per_id = (last.drawn - first.drawn) / (last.stood_in - first.stood_in)
    lags = sorted(simulation.lags) or [0.0]
    metrics, dropped = notes.metrics[measured], simulation.ledger.dropped
    sampled = max(1, simulation.ledger.sampled)
    queries, hits = (sum(getattr(server, name) for server in simulation.servers) for name in ("queries", "hits"))
    return {
        "servers": setting.servers,
        "episodes": setting.episodes,
        "batch": setting.groups * setting.group,
        "core": setting.core,
        "level": setting.level,
        "steps": len(notes.marks[measured]),
        "virtual_seconds": seconds,
        "virtual_seconds_before": first.at,
        "ideal_tokens_per_second": simulation.ideal,
        **of_stretch(simulation, first, last),
        "share_of_each_step": [
            round(of_stretch(simulation, before, after)["share_of_ideal"], 3)
            for before, after in zip(notes.marks[setting.warm_up - 1 :], notes.marks[measured], strict=False)
        ],
        "trained_share": (last.trained - first.trained) * per_id / seconds / simulation.ideal,
        "share_without_updates": (last.drawn - first.drawn) / seconds / simulation.never,
        "step_seconds": seconds / len(notes.marks[measured]),
        "staleness_mean": _mean(m.get("staleness/mean", math.nan) for m in metrics),
        "staleness_max": max(m.get("staleness/max", 0) for m in metrics),
        "stale_share": dropped["stale"] / sampled,
        "lost_share": (dropped["lost_replica"] + dropped["error"]) / sampled,
        "in_flight": _mean(notes.in_flight[measured]),
        "cache_hits": hits / max(1, queries),
        "deaths": simulation.world.num_deaths,
        "resent": simulation.pool._supervisor.counts.resent,
        "messages": dict(simulation.world.messages),
        "lag_p99": lags[int(0.99 * (len(lags) - 1))],
        "lag_max": lags[-1],
        "longest_collection": simulation.longest_collection,
        "memory_mb": memory_used / 2**20,
        "kb_per_episode": memory_used / setting.episodes / 1024,
    }


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


COLUMNS = (
    ("servers", "servers", "{:d}"),
    ("episodes", "episodes", "{:d}"),
    ("core", "core", "{}"),
    ("of ideal", "share_of_ideal", "{:.3f}"),
    ("trained", "trained_share", "{:.3f}"),
    ("step s", "step_seconds", "{:.0f}"),
    ("turns/s", "turns_per_second", "{:.0f}"),
    ("age", "staleness_mean", "{:.2f}"),
    ("oldest", "staleness_max", "{:.0f}"),
    ("messages/s", "messages_per_second", "{:.0f}"),
    ("us/turn", "microseconds_per_turn", "{:.0f}"),
    ("cores", "core_used", "{:.2f}"),
    ("wire", "wire_used", "{:.2f}"),
    ("threads", "threads_used", "{:.2f}"),
    ("lag p99", "lag_p99", "{:.3f}"),
    ("lag max", "lag_max", "{:.1f}"),
    ("KB/episode", "kb_per_episode", "{:.1f}"),
    ("hits", "cache_hits", "{:.2f}"),
)


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [[name for name, _, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[how.format(row[key]) for _, key, how in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
