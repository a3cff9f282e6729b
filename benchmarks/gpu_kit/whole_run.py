"""Part c: the demo on one card, embedded sampler and trainer in turns, from random weights to its success."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .record import Check, Findings
from .setting import Setting

LEARNED, OVER = 0.9, 5
"""The mean training reward over so many steps that counts as learned, as in `benchmarks/learning.py`."""
SECONDS = 222.0
"""For warm start and steps, on a card."""
_SMALL = ("--warm-start.steps", "50", "--warm-start.conversations", "500", "--max-steps", "2")


def demo(setting: Setting, out: Findings) -> None:
    """`verbatim rl guess_number` with both sides on the device. Ends once it has learned."""
    run = setting.folder / "run"
    options = ["--trainer.device", setting.device, "--inference.torch.device", setting.device]
    options += ["--orchestrator.max-async-level", "0", "--orchestrator.eval", "null", "--run-dir", str(run)]
    options += ["--checkpoint.interval", "100000"]
    if setting.tiny:
        options += _SMALL
    log = setting.folder / "run.log"
    began = time.perf_counter()
    with log.open("wb") as file:
        command = [sys.executable, "-m", "verbatim.cli", "rl", "guess_number", *options]
        process = subprocess.Popen(command, cwd=setting.folder, stdout=file, stderr=file)
    try:
        _watch(process, run, began + SECONDS * setting.patience)
    finally:
        status = _end(process)
    steps = train_metrics(run)
    _report(setting, out, steps, time.perf_counter() - began)
    if not setting.tiny:
        out.holds("has learned", has_learned(steps))
    else:
        out.holds("ended well", status == 0)
    if out.wrong:
        out.wrong.append("the run's last words: " + log.read_text(errors="replace")[-1500:])


def _watch(process: subprocess.Popen[bytes], run: Path, until: float) -> None:
    """Wait until the run has learned, has ended, or has had its time."""
    while process.poll() is None and time.perf_counter() < until:
        if has_learned(train_metrics(run)):
            return
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the run as Ctrl-C does, and by force if it does not listen."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _report(setting: Setting, out: Findings, steps: list[dict[str, Any]], seconds: float) -> None:
    rewards = [step["reward/mean"] for step in steps]
    out.holds("steps were trained", bool(steps))
    out.figures.update(steps=len(steps), seconds=round(seconds, 1), rewards=[round(reward, 3) for reward in rewards])
    settled = steps[2:] or steps
    for name in sorted({name for step in settled for name in step if name.startswith("time/")}):
        out.figures[name] = round(statistics.median(step[name] for step in settled if name in step), 3)


def train_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step so far."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    except FileNotFoundError:
        return []
    found = map(json.loads, lines)
    return [line["metrics"] for line in found if line["kind"] == "train"]


def has_learned(steps: list[dict[str, Any]]) -> bool:
    """Whether the last steps' mean reward is high enough."""
    last = [step["reward/mean"] for step in steps[-OVER:]]
    return len(last) == OVER and statistics.fmean(last) >= LEARNED


CHECKS = (
    Check(
        name="the demo learns",
        about=f"guess_number reaches a mean reward of {LEARNED} over {OVER} steps, both sides in turns on one device",
        run=demo,
        seconds=SECONDS + 20,
    ),
)
