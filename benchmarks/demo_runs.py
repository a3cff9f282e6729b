"""Code that the benchmarks of whole runs share: it makes the demo's warm-started model, runs `verbatim`, and reads
metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

RECIPE = Path(__file__).parents[1] / "recipes" / "guess_number.toml"

NO_LEARNING = ("--trainer.optim.lr", "1e-30", "--orchestrator.eval", "null", "--checkpoint.interval", "100000")
"""Options with which every step does its full work but nothing is learned, so that all steps have the same work."""


def verbatim(*arguments: str, cores: Sequence[int] = (), cwd: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start `verbatim` with these arguments in a separate process, on these cores (on all if `cores` is empty). Its
    output goes into a file in `cwd`."""
    pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    name = "-".join(["out", arguments[0], str(len(list(cwd.glob("out-*"))))])
    with (cwd / name).open("wb") as out:
        return subprocess.Popen(
            [*pin, sys.executable, "-m", "verbatim.cli", *arguments],
            cwd=cwd,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
        )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end, and assert that it succeeded."""
    status = process.wait()
    assert status == 0, f"{process.args} ended with {status}"


def warm_started_model(folder: Path, steps: int) -> Path:
    """Make the demo's model with this number of warm-start steps; returns its folder."""
    finish(verbatim("sft", str(RECIPE), "--run-dir", str(folder / "sft"), "--warm-start.steps", str(steps), cwd=folder))
    return folder / "sft" / "warm_start"


def run_options(model: Path, steps: int, level: int) -> list[str]:
    """The command-line arguments to run the demo's recipe with an existing model for this number of steps."""
    return [
        str(RECIPE),
        "--model",
        json.dumps({"name": str(model)}).replace(":", " =", 1).replace('"name"', "name"),
        "--warm-start",
        "null",
        "--max-steps",
        str(steps),
        "--orchestrator.max-async-level",
        str(level),
    ]


class CoresBusy:
    """Measures the processor time of a run, including its child processes, from the end of one of its steps to the end
    of the last step.

    Args:
        process: The process of the run.
        folder: The run folder.
        skip: Number of steps before the measurement begins.
        steps: Number of steps in the run.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, skip: int, steps: int) -> None:
        self._root = psutil.Process(process.pid)
        self._metrics = folder / "metrics.jsonl"
        self._ends = (skip, steps)
        self._seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        for end in self._ends:
            while not self._metrics.exists() or self._metrics.read_text().count('"kind": "train"') < end:
                time.sleep(0.01)
            self._seen.append((time.perf_counter(), self._processor_time()))

    def _processor_time(self) -> float:
        times = [one.cpu_times() for one in (self._root, *self._root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def share(self) -> float:
        """The share of the machine's cores that the run kept busy. 1 means all cores all the time."""
        self._thread.join(60)
        (began, before), (ended, after) = self._seen
        return (after - before) / (ended - began) / len(os.sched_getaffinity(0))


def train_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"] for line in lines if line["kind"] == "train"]


def seconds_per_step(metrics: Sequence[dict[str, Any]], skip: int) -> float:
    """The mean wall-clock time in seconds from one finished step to the next, without the first `skip` steps."""
    seconds = [m["time/step"] for m in metrics[skip:]]
    return float(sum(seconds) / len(seconds))
