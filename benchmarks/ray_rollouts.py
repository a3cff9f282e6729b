"""What playing episodes on Ray actors costs over playing them here, with nothing to wait for.

64 episodes of guess_number at a time, and one alone; a sampler that answers at once with a call of the tool; two actors
on this machine that reach it over loopback. All of the difference is overhead: Ray, and each turn as an HTTP request.

Prints one JSON line; milliseconds are medians over the repetitions, both sides in turns. Run:
python benchmarks/ray_rollouts.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from verbatim.config.schema import BuildConfig
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.resolve import corpus
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.build import build_model
from verbatim.models.loading import load_tokenizer
from verbatim.renderers import create_renderer
from verbatim.rollouts import EpisodeLimits, GroupRun, LocalPlayer, Player, RolloutSetup, trajectory_from_messages
from verbatim.rollouts.remote.episode_actor import RemoteSetup
from verbatim.rollouts.remote.pool import ray_player

EPISODES, CONTEXT = 64, 2048
SIZES = BuildConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512)


async def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Milliseconds of both players."""
    environment = GuessNumber()
    shown = environment.demonstrations(200, seed=0)
    build_model(folder, SIZES, corpus(shown), seed=0)
    renderer = create_renderer("auto", load_tokenizer(folder))
    guess = trajectory_from_messages(renderer, shown[0].messages, shown[0].tools).turns[0].completion_ids
    sampler = ScriptedSampler(script=lambda request: guess, vocab_size=SIZES.vocab_size, context_length=CONTEXT)
    params, limits = SamplingParams(), EpisodeLimits(max_context=CONTEXT)
    remote = RemoteSetup(env="guess_number", name="guess_number", args={}, params=params, limits=limits)
    example = environment.examples("train")[0]

    async def play(player: Player, size: int, index: int) -> tuple[float, int]:
        setup = RolloutSetup(
            env="guess_number", environment=environment, sampler=sampler, renderer=renderer, params=params,
            limits=limits, slots=asyncio.Semaphore(EPISODES), player=player,
        )  # fmt: skip
        began = time.perf_counter()
        group = await GroupRun(setup, example, index=index, size=size, run_seed=0).run()
        seconds = time.perf_counter() - began
        assert all(t.error is None for t in group.trajectories)
        return 1000 * seconds / size, sum(len(t.turns) for t in group.trajectories)

    async with ray_player({("train", "guess_number"): remote}, sampler, renderer, workers=2) as actors:
        players: dict[str, Player] = {"local": LocalPlayer(), "ray": actors}
        found: dict[str, list[float]] = {f"{name}_{what}": [] for name in players for what in ("episode", "alone")}
        num_turns = 0
        for index in range(repeats + 1):
            for name, player in players.items():
                many, num_turns = await play(player, EPISODES, index)
                alone, _ = await play(player, 1, index)
                if index:  # the first one warms up
                    found[f"{name}_episode"].append(many)
                    found[f"{name}_alone"].append(alone)
    return {"turns_per_episode": num_turns / EPISODES,
            **{f"{name}_ms": round(statistics.median(values), 2) for name, values in found.items()}}  # fmt: skip


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder) / "model", args.repeats))
    turns = found["turns_per_episode"]
    cost = {
        "ray_cost_per_turn_ms": round((found["ray_episode_ms"] - found["local_episode_ms"]) / turns, 2),
        "ray_cost_per_turn_alone_ms": round((found["ray_alone_ms"] - found["local_alone_ms"]) / turns, 2),
    }
    print(json.dumps({"benchmark": "ray_rollouts", "cpus": os.cpu_count(), **found, **cost}))


if __name__ == "__main__":
    main()
