"""Measures what it costs to play episodes in other processes instead of this process, and what it gains if environments
compute a lot.

For the cost, 64 concurrent episodes of guess_number are played, and single episodes, with two workers on this machine.
The sampler answers immediately with a tool call, so that all of the difference is overhead. With worker processes, each
turn takes two messages over a socket; with Ray (`--ray`), it takes an HTTP request over loopback. Processor time is
that of this process and the workers together.

For the gain, two environments that compute for 10 ms per turn in Python are played in this process, and then with one
process each. With two free cores, the gain is at most a factor of 2.

The ways to play take turns. Prints one JSON line in milliseconds. Wall-clock times are medians over the repetitions;
processor times are means over all repetitions.
Run: python benchmarks/remote_rollouts.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verbatim.config.schema import BuildConfig
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.resolve import corpus
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.build import build_model
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.rollouts import (
    EpisodeLimits,
    EpisodeRunner,
    GroupRun,
    LocalRunner,
    RolloutSetup,
    trajectory_from_messages,
)
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.processes.runner import process_runner
from verbatim.rollouts.workers.episodes import RemoteSetup

EPISODES, CONTEXT = 64, 2048
SIZES = BuildConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512)
BUSY_SECONDS, BUSY_EPISODES = 0.01, 16


class Busy(GuessNumber):
    """A guess_number whose episodes compute for `BUSY_SECONDS` in each turn."""

    async def start(self, example: Any, seed: int) -> Any:
        """Start an episode that computes."""
        episode = await super().start(example, seed)
        reply = episode.state_key

        def state_key() -> str | None:
            ends = time.process_time() + BUSY_SECONDS
            while time.process_time() < ends:
                pass
            return reply()

        episode.state_key = state_key  # type: ignore[method-assign]
        return episode


class Bench:
    """The sampler, the renderer, and the settings that all episodes share."""

    def __init__(self, folder: Path) -> None:
        self.environment = GuessNumber()
        shown = self.environment.demonstrations(200, seed=0)
        build_model(folder, SIZES, corpus(shown), seed=0)
        self.renderer = create_renderer("auto", load_tokenizer(folder))
        guess = trajectory_from_messages(self.renderer, shown[0].messages, shown[0].tools).turns[0].completion_ids
        self.sampler = ScriptedSampler(script=lambda _: guess, vocab_size=SIZES.vocab_size, context_length=CONTEXT)
        self.params, self.limits = SamplingParams(), EpisodeLimits(max_context=CONTEXT)
        self.example = self.environment.examples("train")[0]

    def remote(self, labels: Sequence[str], name: str) -> dict[tuple[str, str], RemoteSetup]:
        """The setups with which workers play these environments."""
        return {
            ("train", label): RemoteSetup(env=label, name=name, args={}, params=self.params, limits=self.limits)
            for label in labels
        }

    async def play(
        self,
        player: EpisodeRunner,
        size: int,
        index: int,
        label: str = "guess_number",
        environment: GuessNumber | None = None,
    ) -> int:
        """Play one group of episodes; returns its number of turns."""
        setup = RolloutSetup(
            env=label,
            environment=environment or self.environment,
            sampler=self.sampler,
            renderer=self.renderer,
            params=self.params,
            limits=self.limits,
            slots=asyncio.Semaphore(EPISODES),
            runner=player,
        )
        group = await GroupRun(setup, self.example, index=index, size=size, run_seed=0).run()
        assert all(t.error is None for t in group.trajectories)
        return sum(len(t.turns) for t in group.trajectories)


def cpu_seconds(pids: Sequence[int]) -> float:
    """The processor time in seconds of this process and of the given processes so far, with all threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def cost(bench: Bench, repeats: int, *, with_ray: bool) -> dict[str, float]:
    """Measure the milliseconds per episode and per turn for each way to play."""
    remote = bench.remote(["guess_number"], "guess_number")
    async with contextlib.AsyncExitStack() as stack:
        inputs = RunnerInputs(setups=remote, sampler=bench.sampler, renderer=bench.renderer, workers=2)
        processes = await stack.enter_async_context(process_runner(inputs))
        players: dict[str, tuple[EpisodeRunner, Sequence[int]]] = {
            "local": (LocalRunner(), []),
            "processes": (processes, processes.pools["train", "guess_number"].pids),
        }
        if with_ray:
            from verbatim.rollouts.ray.runner import ray_runner

            inputs = RunnerInputs(setups=remote, sampler=bench.sampler, renderer=bench.renderer, workers=2)
            actors = await stack.enter_async_context(ray_runner(inputs))
            players["ray"] = (actors, actors.pids)
        wall: dict[str, list[float]] = defaultdict(list)
        cpu: dict[str, float] = defaultdict(float)
        turns = 0
        for index in range(repeats + 1):
            for name, (player, pids) in players.items():
                for what, size in (("episode", EPISODES), ("alone", 1)):
                    began, before = time.perf_counter(), cpu_seconds(pids)
                    num_turns = await bench.play(player, size, index)
                    seconds, used = time.perf_counter() - began, cpu_seconds(pids) - before
                    if index:  # the first round warms up
                        wall[f"{name}_{what}"].append(1000 * seconds / size)
                        if size > 1:
                            cpu[name] += 1000 * used
                            turns += num_turns
        per_player = turns / len(players)
        found = {f"{name}_ms": round(statistics.median(values), 2) for name, values in wall.items()}
        found |= {f"{name}_cpu_per_turn_ms": round(used / per_player, 3) for name, used in cpu.items()}
        per_episode = per_player / repeats / EPISODES
        for name in list(players)[1:]:
            found[f"{name}_cost_per_turn_ms"] = round(
                (found[f"{name}_episode_ms"] - found["local_episode_ms"]) / per_episode, 2
            )
            found[f"{name}_cpu_cost_per_turn_ms"] = round((cpu[name] - cpu["local"]) / per_player, 3)
        return {"turns_per_episode": per_episode, **found}


async def gain(bench: Bench, repeats: int) -> dict[str, float]:
    """Measure how much faster two computing environments are if each has a process of its own."""
    labels, busy = ("one", "two"), Busy()
    remote = bench.remote(labels, f"{Path(__file__).stem}.Busy")
    inputs = RunnerInputs(setups=remote, sampler=bench.sampler, renderer=bench.renderer, workers=1)
    async with process_runner(inputs) as processes:
        wall: dict[str, list[float]] = defaultdict(list)
        for index in range(repeats + 1):
            for name, player in (("local", LocalRunner()), ("processes", processes)):
                began = time.perf_counter()
                await asyncio.gather(*(bench.play(player, BUSY_EPISODES, index, label, busy) for label in labels))
                if index:
                    wall[name].append(time.perf_counter() - began)
    local, apart = (statistics.median(wall[name]) for name in ("local", "processes"))
    return {
        "busy_local_s": round(local, 3),
        "busy_processes_s": round(apart, 3),
        "busy_speedup": round(local / apart, 2),
    }


def main() -> None:
    """Run the benchmark and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ray", action="store_true", help="actors of a local Ray too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "model")
        found = asyncio.run(cost(bench, args.repeats, with_ray=args.ray))
        found |= asyncio.run(gain(bench, max(1, args.repeats // 2)))
    print(json.dumps({"benchmark": "remote_rollouts", "cpus": len(os.sched_getaffinity(0)), **found}))


if __name__ == "__main__":
    main()
