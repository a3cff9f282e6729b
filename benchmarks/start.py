"""Measures what starting costs: the duration of short commands, and of a run on an existing model up to its first step.

Whole processes are run one after the other. With `--against`, each run is paired with a run of a different checkout, in
alternating order. Prints lines for each command: the median of the seconds and of the processor seconds (of all its
processes). With `--against`, each line also has the mean ratio of this checkout to the other one, with its 95%
interval.

Run: python benchmarks/start.py [--pairs 8] [--against CHECKOUT]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = Path(__file__).parents[1]
MODEL = ("--warm-start", "null", "--orchestrator.eval", "null", "--max-steps", "1")
COMMANDS = {
    "--help": ["--help"],
    "rl --help": ["rl", "--help"],
    "doctor --help": ["doctor", "--help"],
    "config": ["config", "guess_number"],
    "env check": ["env", "check", "guess_number"],
    "rl, to the first step": ["rl", "guess_number", "--run-dir", "run", *MODEL],
}


def measure(tree: Path, name: str, model: Path) -> tuple[float, float]:
    """Run a command with the code of a checkout; returns its duration in seconds, and its processor time in seconds."""
    command = [sys.executable, "-m", "verbatim.cli", *COMMANDS[name]]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("rl,"):
            command += ["--model", json.dumps({"name": str(model)}).replace(":", " =").replace('"name"', "name")]
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        log = Path(folder, "run", "metrics.jsonl")
        while name.startswith("rl,") and not (log.exists() and '"kind": "train"' in log.read_text()):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
            time.sleep(0.005)
        if name.startswith("rl,"):
            seconds = time.perf_counter() - began
            process.send_signal(signal.SIGINT)  # the run ends after this step
        process.wait()
        if not name.startswith("rl,"):
            seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def made_model(folder: Path) -> Path:
    """Make the recipe's model with its warm start; returns the model's folder."""
    shorter = ["rl", "guess_number", "--run-dir", "made", "--orchestrator.eval", "null", "--max-steps", "1"]
    subprocess.run(
        [sys.executable, "-m", "verbatim.cli", *shorter],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(OURS / "src")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return Path(shutil.move(folder / "made" / "warm_start", folder / "model"))


def interval(ratios: list[float]) -> str:
    """The mean of the ratios with its 95% interval, as text. Both are computed from the logarithms of the ratios."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return f"{math.exp(mean):.3f}"
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f})"


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    given = parser.parse_args()
    trees = [OURS] if given.against is None else [OURS, given.against.resolve()]
    with tempfile.TemporaryDirectory() as folder:
        model = made_model(Path(folder))
        for name in COMMANDS:
            seen: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for tree in trees:
                measure(tree, name, model)  # fills caches
            for number in range(given.pairs):
                for tree in trees if number % 2 else reversed(trees):
                    seen[tree].append(measure(tree, name, model))
            for place, what in enumerate(("s", "s of processor")):
                medians = [statistics.median(one[place] for one in seen[tree]) for tree in trees]
                shown = f"{name:<22} {what:<15} " + "  ".join(f"{median:7.2f}" for median in medians)
                if len(trees) == 2:
                    pairs = zip(*(seen[tree] for tree in trees), strict=True)
                    shown += "  " + interval([ours[place] / theirs[place] for ours, theirs in pairs])
                print(shown, flush=True)


if __name__ == "__main__":
    main()
