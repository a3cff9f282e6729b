"""Measures how many rollouts on Ray actors one driver can handle: its processor time per turn and per episode, and its
memory.

The actors play guess_number and request every turn from the driver, whose sampler answers after a delay. So the driver
handles one HTTP request per turn, and one Ray call per episode. The driver's process is measured, with all its threads,
at several numbers of concurrent episodes. `turns_per_core` is the number of turns per second that one core of the
driver can handle. Divided by the turns per second of one server (benchmarks/scale.md), it gives the number of servers
that one core can serve.

Prints one JSON line for each number. Run: python benchmarks/cluster_ray.py [--workers 2] [--episodes 64 512 2048]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from remote_rollouts import Bench
from verbatim.inference import Completion, SampleRequest
from verbatim.inference.sampler import Watch
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeRunner, GroupRun, LocalRunner, RolloutSetup
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.ray.runner import ray_runner


class Slow(ScriptedSampler):
    """A sampler that answers after `seconds`."""

    seconds = 0.2

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        await asyncio.sleep(self.seconds)
        return await super().generate(request, watch)


def memory() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def play(bench: Bench, player: EpisodeRunner, count: int, index: int) -> tuple[int, int]:
    """Play `count` episodes concurrently; returns their number of turns, and the highest memory in bytes that was seen
    meanwhile."""
    setup = RolloutSetup(
        env="guess_number",
        environment=bench.environment,
        sampler=bench.sampler,
        renderer=bench.renderer,
        params=bench.params,
        limits=bench.limits,
        slots=asyncio.Semaphore(count),
        runner=player,
    )
    running = asyncio.ensure_future(GroupRun(setup, bench.example, index=index, size=count, run_seed=0).run())
    most = 0
    while not running.done():
        await asyncio.wait({running}, timeout=0.1)
        most = max(most, memory())
    group = running.result()
    assert all(t.error is None for t in group.trajectories), group.trajectories[0].error
    return sum(len(t.turns) for t in group.trajectories), most


async def measure(folder: Path, workers: int, counts: list[int]) -> None:
    """Run the benchmark, and print one line for each number of episodes."""
    bench = Bench(folder)
    bench.sampler = Slow(script=bench.sampler.script, vocab_size=bench.sampler.vocab_size, context_length=2048)
    inputs = RunnerInputs(
        setups=bench.remote(["guess_number"], "guess_number"),
        sampler=bench.sampler,
        renderer=bench.renderer,
        workers=workers,
    )
    async with ray_runner(inputs) as actors:
        await play(bench, actors, 16, 0)
        for index, count in enumerate(counts, start=1):
            found: dict[str, Any] = {}
            for name, player in (("ray", actors), ("local", LocalRunner())):
                before, used, began = memory(), time.process_time(), time.perf_counter()
                turns, most = await play(bench, player, count, index)
                used, seconds = time.process_time() - used, time.perf_counter() - began
                found[name] = {
                    "turns": turns,
                    "seconds": round(seconds, 2),
                    "turns_per_core": round(turns / used),
                    "ms_per_turn": round(1000 * used / turns, 3),
                    "ms_per_episode": round(1000 * used / count, 3),
                    "kb_per_episode": round((most - before) / count / 1024, 1),
                }
            row = {"benchmark": "cluster_ray", "workers": workers, "episodes": count, **found}
            print(json.dumps(row), flush=True)


def main() -> None:
    """Run the benchmark in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512, 2048])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder) / "model", args.workers, args.episodes))


if __name__ == "__main__":
    main()
