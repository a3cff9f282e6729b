"""Writes metrics as JSON lines: one line per step and one per evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbatim.logs.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor
from verbatim.logs.monitors.jsonl import JsonlWriter, LogMark


class MetricsLog(Monitor):
    """`{"step": 3, "kind": "train", "time": 1767225600.5, "metrics": {...}}`, or `"kind": "eval"` with `"env"`.

    `time` is when the line was written, in seconds since 1970 (UTC). `mark` is as for `JsonlWriter`.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time, mark: LogMark | None = None) -> None:
        self.writer = JsonlWriter(path, mark)
        self._now = now

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        self.writer.write({"step": step, "kind": "train", "time": self._now(), "metrics": metrics})

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self.writer.write({"step": step, "kind": "eval", "time": self._now(), "env": env, "metrics": metrics})

    def close(self) -> None:
        self.writer.close()


def is_metrics(record: Any) -> bool:
    """Whether a value is a line that `MetricsLog` writes."""
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and isinstance(record.get("metrics"), dict)
        and (record.get("kind") == "train" or (record.get("kind") == "eval" and isinstance(record.get("env"), str)))
    )
