"""Metrics as JSON lines: one line per step and one per evaluation."""

from __future__ import annotations

from pathlib import Path

from verbatim.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics
from verbatim.monitors.jsonl import JsonlWriter


class MetricsLog:
    """`{"step": 3, "kind": "train", "metrics": {...}}`, or `"kind": "eval"` with `"env"`."""

    def __init__(self, path: Path) -> None:
        self.writer = JsonlWriter(path)

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """One line."""
        self.writer.write({"step": step, "kind": "train", "metrics": metrics})

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """One line."""
        self.writer.write({"step": step, "kind": "eval", "env": env, "metrics": metrics})

    def close(self) -> None:
        """Close the file."""
        self.writer.close()
