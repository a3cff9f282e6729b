"""What one driver can hold of rollouts on Ray actors: its processor time for a turn and an episode, and its memory.

The actors play guess_number and ask the driver for every turn, whose sampler answers after a while; so the driver has
one request of HTTP for each turn, and one call of Ray for each episode. Measured is the driver's process, all its
threads, at several numbers of episodes under way. `turns_per_core` is what one core of it carries; the number of
servers that is enough for is that over the turns of a server in benchmarks/scale.md.

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
    """Answers after a while."""

    seconds = 0.2

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        await asyncio.sleep(self.seconds)
        return await super().generate(request, watch)


def memory() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def play(bench: Bench, player: EpisodeRunner, count: int, index: int) -> tuple[int, int]:
    """So many episodes at once: their turns, and the most memory seen meanwhile."""
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
    """Print a line for each number of episodes."""
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
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512, 2048])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder) / "model", args.workers, args.episodes))


if __name__ == "__main__":
    main()
