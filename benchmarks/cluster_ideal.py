"""The throughput that simulated servers could have, worked out without the simulation: what `cluster.py` compares
with.

Each server has its share of the episodes, all the time. An episode samples a turn, then waits for a tool. With n of
them in the batch, a decode step takes `step + step_per_request * n`, and prompt tokens that are new are computed at
`prefill` tokens per second while decoding stands still. So a server ends X = n / (tokens * step(n) + n * new_tokens /
prefill) turns a second, and n + X * tool_seconds is its share of the episodes (Little's law): that gives n.

Published weights cost every server a pause, and its prefix cache: the contexts of its episodes are computed once more.
So much of the time between two steps is lost to any orchestrator that loads every version.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster_workload import Script, Tables
from cluster_world import Curve


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a turn is like on average."""

    tokens: float
    """Sampled tokens."""
    new_tokens: float
    """Tokens of the prompt that no earlier turn computed."""
    context: float
    """Tokens of an episode at a random turn."""
    tool: float
    """Seconds in a tool."""
    turns: float
    """Turns of an episode."""


def means(tables: Tables, episodes: int = 4096) -> Means:
    """Over as many episodes."""
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
    """What one server with so many episodes completes."""

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
    """Sampled tokens per second of all servers: with the cost of updates, and if weights never changed.

    Args:
        servers: Servers.
        episodes: Episodes at once, on all of them.
        batch: Episodes of a step: an update follows each.
        curve: A server's speed.
        mean: What a turn is like.
        update: Seconds of a pause.
    """
    share = episodes / servers
    never = servers * turns_per_second(share, curve, mean)
    lost = update + min(share * mean.context, curve.cache) / curve.prefill
    step = batch * mean.turns / never
    return never * mean.tokens / (1 + lost / step), never * mean.tokens
