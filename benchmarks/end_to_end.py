"""Measures episodes per second of whole training runs on guess_number, in which episodes are sampled, scored and
trained.

    python benchmarks/end_to_end.py [--steps 30] [--repetitions 3] [--warm-start-steps 600]

Runs `verbatim rl` with the unchanged recipe, except that nothing is learned (a learning rate of 1e-30). So every step
has the same work, on groups of which about half are won, which cost the most. The first steps are left out. Synchronous
and asynchronous runs take turns. Prints one JSON line; figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from demo_runs import NO_LEARNING, finish, run_options, seconds_per_step, train_metrics, verbatim, warm_started_model

SKIP = 4
ELSEWHERE = 6.3
"""Episodes per second of a widely used trainer with built-in tool environments, on the same game and a similar machine,
with a model of 0.9M parameters."""


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warm-start-steps", type=int, default=600)
    args = parser.parse_args()
    rates: dict[int, list[float]] = {0: [], 1: []}
    trained: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = warm_started_model(folder, args.warm_start_steps)
        for repetition in range(args.repetitions):
            for level, found in rates.items():
                run = folder / f"run-{level}-{repetition}"
                options = [*run_options(model, args.steps, level), *NO_LEARNING, "--run-dir", str(run)]
                finish(verbatim("rl", *options, cwd=folder))
                metrics = train_metrics(run)
                episodes = metrics[-1]["rollouts"] - metrics[-1]["rollouts/failed"]
                found.append(episodes / seconds_per_step(metrics, SKIP))
                trained.append(sum(m["trained_tokens"] for m in metrics) / metrics[-1]["ledger/sampled"])
    asynchronous, synchronous = statistics.median(rates[1]), statistics.median(rates[0])
    print(
        json.dumps(
            {
                "benchmark": "end_to_end",
                "episodes_per_second": round(asynchronous, 1),
                "episodes_per_second_synchronous": round(synchronous, 1),
                "asynchronous_over_synchronous": round(asynchronous / synchronous, 3),
                "over_6.3_per_second": round(asynchronous / ELSEWHERE, 1),
                "share_of_sampled_tokens_trained": round(statistics.median(trained), 3),
                "each": {str(level): [round(rate, 1) for rate in found] for level, found in rates.items()},
                "steps": args.steps,
                "cores": len(os.sched_getaffinity(0)),
            }
        )
    )


if __name__ == "__main__":
    main()
