"""Writes metrics as JSON lines, one per step and one per evaluation, and reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.core.formats import FORMATS, KEY, stamped
from verbatim.logs.monitors.jsonl import JsonlLog, LogMark, read_log
from verbatim.logs.monitors.monitor import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor

METRICS = "metrics.jsonl"
Rows = list[tuple[int, Mapping[str, Any]]]
"""Pairs of step and metrics."""


class MetricsLog(JsonlLog, Monitor):
    """Writes lines such as `{"format": 1, "step": 3, "kind": "train", "time": 1767225600.5, "metrics": {...}}`. The
    lines of evaluations have `"kind": "eval"` and the key `"env"`.

    `time` is when the line was written, in seconds since 1970 (UTC).
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time, mark: LogMark | None = None) -> None:
        super().__init__(path, mark)
        self._now = now

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        self._write({"step": step, "kind": "train", "time": self._now(), "metrics": metrics})

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self._write({"step": step, "kind": "eval", "time": self._now(), "env": env, "metrics": metrics})

    def _write(self, record: Mapping[str, Any]) -> None:
        self.writer.write(stamped(METRICS, record))


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a run's metrics, in order. Raises the same errors as `read_log`."""
    return read_log(path, METRICS)


def read_history(path: Path) -> tuple[Rows, dict[str, Rows]]:
    """Read the metrics of a run's steps, and of its evaluations by environment, in order. Raises the same errors as
    `read_log`."""
    steps: Rows = []
    evals: dict[str, Rows] = {}
    for record in read_metrics(path):
        rows = steps if record["kind"] == "train" else evals.setdefault(record["env"], [])
        rows.append((record["step"], record["metrics"]))
    return steps, evals


def is_metrics(record: Any) -> bool:
    """True if a JSON value is a record written by `MetricsLog`."""
    return (
        isinstance(record, dict)
        and record.get(KEY) == FORMATS[METRICS]
        and type(record.get("step")) is int
        and isinstance(record.get("metrics"), dict)
        and (record.get("kind") == "train" or (record.get("kind") == "eval" and isinstance(record.get("env"), str)))
    )
