"""Computes, without a simulation, the best throughput that the simulated servers could have. `cluster.py` compares its
results with it.

Each server always has an equal share of the episodes. An episode samples a turn, then waits for a tool. With n requests
in a server's batch, a decode step takes step(n) = `step + step_per_request * n` seconds. New prompt tokens are computed
at `prefill` tokens per second, and decoding stands still meanwhile. So the number of turns that a server completes per
second is X = n / (tokens * step(n) + n * new_tokens / prefill). By Little's law, its share of the episodes is n + X *
tool_seconds, which determines n.

Each time weights are published, every server pauses, and loses its prefix cache, so that the contexts of its episodes
are computed again. Any orchestrator that loads every version loses this much of the time between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster_workload import Script, Tables
from cluster_world import Curve


@dataclass(frozen=True, kw_only=True)
class Means:
    """Averages over turns and episodes."""

    tokens: float
    """Mean number of sampled tokens per turn."""
    new_tokens: float
    """Mean number of prompt tokens per turn that no earlier turn has computed."""
    context: float
    """Mean number of prompt tokens of a turn."""
    tool: float
    """Mean number of seconds per turn in a tool."""
    turns: float
    """Mean number of turns per episode."""


def means(tables: Tables, episodes: int = 4096) -> Means:
    """Compute the averages over this number of episodes."""
    tokens, contexts, new, tools, turns = 0, 0, 0, 0.0, 0
    for seed in range(1, episodes + 1):
        script = Script(tables, seed)
        while True:
            turns += 1
            tokens += script.length
            contexts += script.context
            new += tables.work.answer if script.turn else script.context
            if script.is_last:
                break
            tools += min(script.tool_seconds, tables.work.tool_timeout)
            script.go_on()
    return Means(
        tokens=tokens / turns,
        new_tokens=new / turns,
        context=contexts / turns,
        tool=tools / turns,
        turns=turns / episodes,
    )


def turns_per_second(episodes: float, curve: Curve, mean: Means) -> float:
    """The number of turns per second that one server with this number of episodes completes."""

    def rate(n: float) -> float:
        return n / (mean.tokens * (curve.step + curve.step_per_request * n) + n * mean.new_tokens / curve.prefill)

    low, high = 0.0, min(episodes, float(curve.most_running))
    if high + rate(high) * mean.tool <= episodes:
        return rate(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle + rate(middle) * mean.tool < episodes else (low, middle)
    return rate(low)


def ideal(servers: int, episodes: int, batch: int, curve: Curve, mean: Means, *, update: float) -> tuple[float, float]:
    """The sampled tokens per second of all servers together, as a pair: with the cost of weight updates, and without
    updates.

    Args:
        servers: Number of servers.
        episodes: Number of concurrent episodes, on all servers together.
        batch: Number of episodes in a training step. A weight update follows each step.
        curve: The speed of a server.
        mean: The averages of the workload.
        update: Seconds for which an update pauses a server.
    """
    share = episodes / servers
    never = servers * turns_per_second(share, curve, mean)
    lost = update + min(share * mean.context, curve.cache) / curve.prefill
    step = batch * mean.turns / never
    return never * mean.tokens / (1 + lost / step), never * mean.tokens
