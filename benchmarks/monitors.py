"""Measures what monitors cost a run: the time that a step waits for each monitor, and the processor time of all
threads.

Each step has 90 metrics, 5 distributions and 128 rollouts with conversations. Every tenth step also has a table of four
of the rollouts, and every twentieth step has an evaluation. The console draws for a terminal of 120 columns. There is a
step every `--seconds`, so that threads and the live view work as in a run. `closing` is the time that the end of the
run waits for the rest of the queue and, in the first run with a database, for the creation of its tables. W&B records
offline; the work of its own process is not counted.

Prints one JSON line: for each monitor, the median wait per step and the processor time per step.
Run: python benchmarks/monitors.py
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import rich.console

from verbatim import Trajectory, Turn
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors import Alarm, AlarmLog, Console, MetricsLog, Monitor, Monitors, RunInfo
from verbatim.logs.monitors.metric_table import METRICS

ROLLOUTS, NAMES = 128, [metric.name for metric in METRICS if "{" not in metric.name][:90]


def outcomes_of(step: int) -> list[TrajectoryOutcome]:
    """Make the outcomes of one step, each with a conversation of about two thousand characters."""
    messages = tuple({"role": role, "content": "word " * 100} for role in ("system", "user", "assistant", "tool"))
    turn = Turn(prompt_ids=list(range(50)), completion_ids=list(range(40)))
    return [
        TrajectoryOutcome(
            trajectory=Trajectory(
                example_id=str(n),
                trajectory_id=f"{step}-{n}",
                env="game",
                reward=n / ROLLOUTS,
                turns=(turn,),
                messages=messages,
            ),
            turns=("trained",),
        )
        for n in range(ROLLOUTS)
    ]


def monitors(folder: Path) -> Mapping[str, Callable[[], Monitor]]:
    """By name, a function for each monitor that creates it."""
    from verbatim.logs.monitors.mlflow import Mlflow
    from verbatim.logs.monitors.tensorboard import Tensorboard
    from verbatim.logs.monitors.wandb import Wandb

    run = RunInfo(name="bench", folder=folder, config={"max_steps": 100, "model": {"name": "m"}})
    terminal = rich.console.Console(file=io.StringIO(), width=120, force_terminal=True)
    return {
        "nothing": lambda: AlarmLog(folder / "alarms.jsonl"),
        "metrics.jsonl": lambda: MetricsLog(folder / "metrics.jsonl"),
        "console": lambda: Console(100_000, console=terminal),
        "tensorboard": lambda: Tensorboard()(run),
        "mlflow": lambda: Mlflow(experiment="bench", tracking_uri=f"sqlite:///{folder}/mlflow.db")(run),
        "wandb": lambda: Wandb(project="bench", mode="offline")(run),
    }


def measure(make: Callable[[], Monitor], steps: int, seconds: float) -> dict[str, float]:
    """Run steps with one monitor. Returns, in milliseconds, the median and the longest wait of a step, the processor
    time per step, and the wait at the end."""
    metrics = {name: number / 7 for number, name in enumerate(NAMES)}
    distributions = {f"distribution/{name}": [n / 3 for n in range(ROLLOUTS)] for name in "abcde"}
    outcomes = outcomes_of(1)
    told, waits = Monitors([make()]), []
    told.on_start({})
    time.sleep(10 * seconds)  # by now, the thread has loaded its package
    before = time.process_time()
    for step in range(1, steps + 1):
        began = time.perf_counter()
        told.on_step(step, metrics, distributions)
        told.on_trajectories(step, outcomes)
        if step % 20 == 0:
            told.on_eval(step, "game", metrics)
        waits.append(time.perf_counter() - began)
        time.sleep(seconds)
    told.on_alarm(Alarm(name="stale", step=steps, state="raised", message="m", cause="c", advice="a"))
    used = time.process_time() - before
    began = time.perf_counter()
    told.on_end({"state": "finished", "steps": steps, "results": {}})
    told.close()
    closing = time.perf_counter() - began
    assert told.num_failures == 0
    found = {"waits": statistics.median(waits), "longest_wait": max(waits), "processor": used / steps}
    return {**{name: round(1000 * value, 2) for name, value in found.items()}, "closing": round(1000 * closing)}


def main() -> None:
    """Measure the monitors one after the other, in the same process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--only", nargs="*", help="names of monitors")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        found = {
            name: measure(make, args.steps, args.seconds)
            for name, make in monitors(Path(place)).items()
            if not args.only or name in args.only
        }
        os.chdir("/")
    print(json.dumps({"milliseconds": found, "steps": args.steps, "seconds_between": args.seconds}))


if __name__ == "__main__":
    main()
