"""What the benchmarks of whole runs share: the demo's model after its warm start, runs of it, and their metrics."""

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
"""Every step does its work, and the next one has the same work to do."""


def verbatim(*arguments: str, cores: Sequence[int] = (), cwd: Path, **environment: str) -> subprocess.Popen[bytes]:
    """`verbatim ...` in a process of its own, on these cores (all, if none are named), its output into a file."""
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
    """Wait for a process that has to succeed."""
    status = process.wait()
    assert status == 0, f"{process.args} ended with {status}"


def warm_started_model(folder: Path, steps: int) -> Path:
    """The demo's model, after so many steps of its warm start."""
    finish(verbatim("sft", str(RECIPE), "--run-dir", str(folder / "sft"), "--warm-start.steps", str(steps), cwd=folder))
    return folder / "sft" / "warm_start"


def run_options(model: Path, steps: int, level: int) -> list[str]:
    """The recipe with a model that is there already, for so many steps."""
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
    """Processor time of a run and its processes from one of its steps to its last one.

    Args:
        process: The run.
        folder: Its run folder.
        skip: Steps before the time counts.
        steps: Steps of the run.
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
        """The share of the machine's cores that it kept busy: 1 = all of them, all the time."""
        self._thread.join(60)
        (began, before), (ended, after) = self._seen
        return (after - before) / (ended - began) / len(os.sched_getaffinity(0))


def train_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"] for line in lines if line["kind"] == "train"]


def seconds_per_step(metrics: Sequence[dict[str, Any]], skip: int) -> float:
    """Wall time from one finished step to the next, on average, without the first ones."""
    seconds = [m["time/step"] for m in metrics[skip:]]
    return float(sum(seconds) / len(seconds))
