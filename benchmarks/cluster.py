"""How many servers one orchestrator drives: its real loop, dispatcher, ledger, groups and routing, on simulated
servers.

Time is virtual (`cluster_clock.py`): servers, tools and the trainer are simulated (`cluster_parts.py`), everything
between them is the code of a run. Servers draw tokens as published figures say of an 8B model on an H100, hold
prefixes, load weights, fail and come back; tools have long tails. Compared with is what the same servers could do
(`cluster_ideal.py`).

The processor is either free (`--core free`: what the rules allow), or one core of this machine (`--core one`: virtual
time moves on while the code computes; `--core wire` adds what the HTTP client costs for each message). What is not in
it: the template of a conversation, tokens themselves (ids are `SCALE` times shorter), and the trajectory log.

Prints one JSON line for each row, then a table. The whole of it takes half an hour of one core and 8 GB of memory,
`--short` three minutes. Run: python benchmarks/cluster.py [--short] [--servers 1 10 100 1000] [--core free one wire]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_clock import VirtualLoop, running, virtual_runner
from cluster_ideal import ideal, means
from cluster_parts import (
    CONTEXT,
    Curve,
    Errands,
    Faults,
    Server,
    SimulatedTrainer,
    StandInRenderer,
    Workload,
    World,
)
from verbatim.credit.default import default_advantage
from verbatim.curriculum import ExampleSchedule
from verbatim.inference import SamplingParams
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.orchestrator.assemble import GroupRules
from verbatim.orchestrator.base import RunSchedule
from verbatim.orchestrator.collector import seldom_collected
from verbatim.orchestrator.dispatcher import Dispatcher
from verbatim.orchestrator.loop import Orchestrator
from verbatim.rollouts import EpisodeLimits, RolloutSetup
from verbatim.trajectories import Ledger

WIRE = {"generate": 1280e-6, "health": 200e-6, "load_metrics": 300e-6, "prompt_logprobs": 300e-6}
"""Processor seconds that the HTTP client takes for a message: of a turn, 200 us for the request (`http_client.py`) and
1,080 us to read vLLM's answer of 1,533 tokens with their logprobs."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row."""

    servers: int
    per_server: int = 100
    """Episodes at once, for each server."""
    group: int = 16
    batch_share: float = 0.5
    """Episodes of a batch, as a share of those at once."""
    level: int = 4
    bound: int = 8
    """max_async_level and max_off_policy_steps."""
    core: str = "free"
    """Whose processor time counts: "free", "one", "wire"."""
    warm_up: int = 3
    steps: int = 4
    """Steps before those that are measured, and those."""
    train_share: float = 0.6
    """Seconds of a training step, as a share of the time in which the servers sample a batch."""
    seed: int = 0
    curve: Curve = field(default_factory=Curve)
    work: Workload = field(default_factory=Workload)
    faults: Faults = field(default_factory=Faults)

    @property
    def episodes(self) -> int:
        """Episodes at once."""
        return self.servers * self.per_server

    @property
    def groups(self) -> int:
        """Groups of a batch."""
        return max(1, round(self.episodes * self.batch_share / self.group))


@dataclass(eq=False)
class Mark:
    """Counts at one moment."""

    at: float
    drawn: float
    stood_in: int
    trained: int
    turns: int
    episodes: int
    messages: int
    code: float
    threads: float
    wire: float
    collecting: float
    busy: float


class Notes:
    """Observer and checkpointer: keeps what the steps say, and asks the run to end after the last one."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.marks: list[Mark] = []
        self.metrics: list[Mapping[str, float]] = []
        self.in_flight: list[int] = []
        """Episodes under way, at the end of each step."""
        self.simulation: Simulation | None = None

    def on_step(self, step: int, metrics: Mapping[str, float], fates: Sequence[Any]) -> None:
        assert self.simulation is not None
        self.metrics.append(metrics)
        self.in_flight.append(len(self.simulation.world.scripts))
        if self._setting.warm_up <= step <= self._setting.warm_up + self._setting.steps:
            self.marks.append(self.simulation.mark())
        if step >= self._setting.warm_up + self._setting.steps:
            self.simulation.orchestrator.request_stop()

    def on_eval(self, step: int, evaluation: Any) -> None:
        raise AssertionError

    def stage(self, what: str, total: int | None = None, *, count: Any = None) -> Any:
        return contextlib.nullcontext()

    async def save(self, step: int, trainer: Any, state: Mapping[str, Any], trainer_state: Path | None = None) -> None:
        self.saved = state

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        raise AssertionError


class Simulation:
    """One run: the orchestrator as `run/training_run.py` makes it, with simulated parts at its edges."""

    def __init__(self, setting: Setting, loop: VirtualLoop) -> None:
        self.setting, self.loop, self.notes = setting, loop, Notes(setting)
        wire = WIRE if setting.core == "wire" else {}
        self.world = world = World(loop=loop, curve=setting.curve, work=setting.work, faults=setting.faults, wire=wire,
                                   seed=setting.seed)  # fmt: skip
        self.mean = means(world.tables)
        self.ideal, self.never = ideal(
            setting.servers, setting.episodes, setting.groups * setting.group, setting.curve, self.mean,
            update=setting.faults.update,
        )  # fmt: skip
        self.servers = [Server(world, index) for index in range(setting.servers)]
        self.pool = ReplicaPool(self.servers, restart=self._restart)  # type: ignore[arg-type]
        environment, ledger = Errands(world), Ledger()
        setup = RolloutSetup(
            env="errands", environment=environment, sampler=self.pool, renderer=StandInRenderer(setting.work),
            params=SamplingParams(max_tokens=CONTEXT), limits=EpisodeLimits(
                max_turns=setting.work.turns[1], max_context=CONTEXT, timeout=36_000.0,
                tool_timeout=setting.work.tool_timeout,
            ), slots=asyncio.Semaphore(setting.episodes),
        )  # fmt: skip
        self.ledger = ledger
        self.dispatcher = Dispatcher(
            schedule=ExampleSchedule({"errands": environment.examples("train")}, {"errands": 1.0}, seed=setting.seed),
            setups={"errands": setup}, ledger=ledger, group_size=setting.group, groups_per_batch=setting.groups,
            max_async_level=setting.level, max_off_policy_steps=setting.bound, run_seed=setting.seed,
            oversampling_factor=setting.level + 1.0, max_steps=10_000,
        )  # fmt: skip
        rules = GroupRules(
            advantage=default_advantage, filters={}, strategy="interleaved", max_length=CONTEXT,
            max_off_policy_steps=setting.bound,
        )  # fmt: skip
        step = setting.groups * setting.group * self.mean.turns * self.mean.tokens / self.never
        self.orchestrator = Orchestrator(
            schedule=RunSchedule(
                max_steps=10_000, eval_setups=[], eval_interval=10_000, eval_episodes=0, eval_seed=0,
                checkpoint_interval=10_000,
            ), sampler=self.pool, trainer=SimulatedTrainer(world, setting.train_share * step),
            dispatcher=self.dispatcher, ledger=ledger, rules={"errands": rules},
            environments={"errands": environment}, observer=self.notes, checkpointer=self.notes,
            probes=world.published(0),
        )  # fmt: skip
        self.notes.simulation = self
        self.collecting = 0.0
        self.lags: list[float] = []

    async def _restart(self, index: int) -> Server:
        await self.loop.sleep(self.setting.faults.restart)
        self.servers[index] = Server(self.world, index)
        return self.servers[index]

    def mark(self) -> Mark:
        """Counts as they are."""
        world, loop = self.world, self.loop
        return Mark(
            at=loop.time(), drawn=world.drawn, stood_in=world.stood_in, trained=self.ledger.trained, turns=world.turns,
            episodes=world.episodes, messages=sum(world.messages.values()), code=loop.code_seconds,
            threads=loop.thread_seconds, wire=loop.wire_seconds, collecting=self.collecting,
            busy=world.busy,
        )  # fmt: skip

    async def run(self) -> None:
        """To the end of the last measured step, and through the shutdown."""
        probe = asyncio.create_task(self._probe())
        gc.callbacks.append(self._collected)
        try:
            with seldom_collected():
                await self.orchestrator.run()
        finally:
            gc.callbacks.remove(self._collected)
            probe.cancel()
            await self.pool.close()
        self.ledger.check(self.dispatcher.num_pending_tokens)

    async def _probe(self) -> None:
        while True:
            due = self.loop.time() + 0.05
            await asyncio.sleep(0.05)
            self.lags.append(self.loop.time() - due)
            if not self.notes.marks:
                self.lags.clear()

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._since = now
        else:
            self.collecting += now - self._since


def simulate(setting: Setting) -> dict[str, Any]:
    """One row, as figures by name."""
    before, began = memory(), time.thread_time()
    with virtual_runner(0.0 if setting.core == "free" else 1.0) as runner, sampled_stacks() as stacks:

        async def main() -> tuple[Simulation, int]:
            simulation = Simulation(setting, running())
            await simulation.run()
            return simulation, memory()

        simulation, after = runner.run(main())
    return {**figures(simulation, after - before), "top": stacks(), "processor_seconds": time.thread_time() - began}


def figures(simulation: Simulation, memory_used: int) -> dict[str, Any]:
    """What came of the measured steps."""
    setting, notes = simulation.setting, simulation.notes
    first, last = notes.marks[0], notes.marks[-1]
    seconds, turns = last.at - first.at, last.turns - first.turns
    per_id = (last.drawn - first.drawn) / (last.stood_in - first.stood_in)
    measured = notes.metrics[setting.warm_up : setting.warm_up + setting.steps]
    sampled = (last.drawn - first.drawn) / seconds
    trained = (last.trained - first.trained) * per_id / seconds
    code, lags = last.code - first.code, sorted(simulation.lags) or [0.0]
    dropped = simulation.ledger.dropped
    queries, hits = (sum(getattr(server, name) for server in simulation.servers) for name in ("queries", "hits"))
    counts = simulation.pool._roster.counts
    return {
        "servers": setting.servers, "episodes": setting.episodes, "batch": setting.groups * setting.group,
        "core": setting.core, "level": setting.level,
        "ideal_tokens_per_second": simulation.ideal, "share_of_ideal": sampled / simulation.ideal,
        "trained_share": trained / simulation.ideal, "share_without_updates": sampled / simulation.never,
        "step_seconds": seconds / setting.steps, "turns_per_second": turns / seconds,
        "servers_busy": (last.busy - first.busy) / seconds / setting.servers,
        "staleness_mean": _mean(m.get("staleness/mean", math.nan) for m in measured),
        "staleness_max": max(m.get("staleness/max", 0) for m in measured),
        "stale_share": dropped["stale"] / max(1, simulation.ledger.sampled),
        "lost_share": (dropped["lost_replica"] + dropped["error"]) / max(1, simulation.ledger.sampled),
        "in_flight": _mean(notes.in_flight[setting.warm_up : setting.warm_up + setting.steps]),
        "cache_hits": hits / max(1, queries), "deaths": simulation.world.num_deaths, "resent": counts.resent,
        "messages_per_second": (last.messages - first.messages) / seconds,
        "messages": dict(simulation.world.messages),
        "core_used": code / seconds, "microseconds_per_turn": code / turns * 1e6,
        "threads_used": (last.threads - first.threads) / seconds, "wire_used": (last.wire - first.wire) / seconds,
        "collecting_used": (last.collecting - first.collecting) / seconds,
        "lag_p99": lags[int(0.99 * (len(lags) - 1))], "lag_max": lags[-1],
        "memory_mb": memory_used / 2**20, "kb_per_episode": memory_used / setting.episodes / 1024,
    }  # fmt: skip


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def memory() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextlib.contextmanager
def sampled_stacks(interval: float = 0.01) -> Iterator[Any]:
    """Where the loop's thread is, looked at a hundred times a second: shares by the innermost module of ours."""
    found: Counter[str] = Counter()
    ended, thread = threading.Event(), threading.get_ident()

    def look() -> None:
        while not ended.wait(interval):
            frame = sys._current_frames().get(thread)
            while (
                frame is not None
                and "/verbatim/" not in frame.f_code.co_filename
                and ("/benchmarks/cluster_" not in frame.f_code.co_filename)
            ):
                frame = frame.f_back
            if frame is not None:
                path = frame.f_code.co_filename
                part = path.partition("/verbatim/")[2] or Path(path).name
                found[f"{part.removesuffix('.py')}:{frame.f_code.co_name}"] += 1

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()

    def top(count: int = 8) -> dict[str, float]:
        ours = {name: number for name, number in found.items() if not name.startswith("cluster_")}
        total = sum(ours.values()) or 1
        return {name: round(number / total, 3) for name, number in Counter(ours).most_common(count)}

    try:
        yield top
    finally:
        ended.set()
        watcher.join()


COLUMNS = (
    ("servers", "servers", "{:d}"), ("episodes", "episodes", "{:d}"), ("core", "core", "{}"),
    ("of ideal", "share_of_ideal", "{:.3f}"), ("trained", "trained_share", "{:.3f}"),
    ("step s", "step_seconds", "{:.0f}"), ("turns/s", "turns_per_second", "{:.0f}"),
    ("age", "staleness_mean", "{:.2f}"), ("oldest", "staleness_max", "{:.0f}"),
    ("messages/s", "messages_per_second", "{:.0f}"), ("us/turn", "microseconds_per_turn", "{:.0f}"),
    ("cores", "core_used", "{:.2f}"), ("wire", "wire_used", "{:.2f}"), ("threads", "threads_used", "{:.2f}"),
    ("lag p99", "lag_p99", "{:.3f}"), ("KB/episode", "kb_per_episode", "{:.1f}"), ("hits", "cache_hits", "{:.2f}"),
)  # fmt: skip


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [[name for name, _, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[how.format(row[key]) for _, key, how in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--per-server", type=int, default=100, help="episodes at once on each server")
    parser.add_argument("--core", nargs="+", choices=("free", "one", "wire"), default=["free", "one"])
    parser.add_argument("--level", type=int, default=4, help="max_async_level")
    parser.add_argument("--batch-share", type=float, default=0.5, help="a batch, as a share of the episodes at once")
    parser.add_argument("--steps", type=int, help="to be measured; by default 12 of few servers, 1 of 1,000")
    parser.add_argument("--short", action="store_true", help="three minutes: fewer steps, and 10 episodes on each of "
                        "1,000 servers")  # fmt: skip
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    rows = []
    for servers in args.servers:
        for core in ["one"] if args.short else args.core:
            most = (80 if args.short else 200) // servers
            per_server = min(args.per_server, max(10, 10_000 // servers)) if args.short else args.per_server
            row = simulate(Setting(
                servers=servers, per_server=per_server, core=core, level=args.level, batch_share=args.batch_share,
                warm_up=max(1, min(4, most)), steps=args.steps or max(1, min(12, most)),
            ))  # fmt: skip
            rows.append(row)
            print(json.dumps({"benchmark": "cluster", **row}), flush=True)
    print(show(rows))


if __name__ == "__main__":
    main()
