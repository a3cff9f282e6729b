"""Prints a run as JSON lines for programs: an object for each step, evaluation and alarm, and one for the end."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, TextIO

from verbatim.core.trajectory_json import plain
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.monitor import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor

logger = logging.getLogger(__name__)


class JsonLines(Monitor):
    """Prints lines such as `{"kind": "step", "step": 1, "metrics": {...}}`, `{"kind": "eval", "step": 0, "env": "game",
    "metrics": {...}}`, `{"kind": "alarm", ...}` with the alarm's fields, and `{"kind": "end", "state": "finished",
    ...}` with the summary of `Monitor.on_end`. NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", as
    JSON has no such numbers.

    Args:
        stream: Where to print. Each line is flushed. If the reader closes the pipe, printing stops and the run
            continues.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_reader = True

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        self._print("step", {"step": step, "metrics": metrics})

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self._print("eval", {"step": step, "env": env, "metrics": metrics})

    def on_alarm(self, alarm: Alarm) -> None:
        self._print("alarm", vars(alarm))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._print("end", summary)

    def _print(self, kind: str, record: Mapping[str, Any]) -> None:
        if not self._has_reader:
            return
        line = json.dumps({"kind": kind, **plain(record)}, allow_nan=False, default=str) + "\n"
        try:
            self._stream.write(line)
            self._stream.flush()
        except BrokenPipeError:
            self._has_reader = False
            logger.warning("the program that read the run's JSON lines has exited; the run goes on without it")
