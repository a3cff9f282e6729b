"""Follows the metrics and alarms of a run."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.core.errors import FormatError
from verbatim.core.formats import content_of
from verbatim.core.texts import cut
from verbatim.inspection.viewer.lines import FollowedLines
from verbatim.logs.monitors.metric_table import descriptions

_MOST_COLUMNS = 5_000
"""Maximum number of metrics to keep."""


class MetricsFollower:
    """Follows the step metrics (as columns) and the evaluations in `metrics.jsonl`, and the alarms in `alarms.jsonl`.

    Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = FollowedLines(folder / "metrics.jsonl")
        self._alarm_lines = FollowedLines(folder / "alarms.jsonl")
        self.generation = 0
        """A number that increases when the files were rewritten, which happens if the run is resumed from an earlier
        step."""
        self._clear()
        self._looked_up: set[str] = set()
        self._named: dict[str, dict[str, str]] = {}

    def _clear(self) -> None:
        self.steps: list[int] = []
        self.times: list[float | None] = []
        """The time at which each step was logged, in seconds since 1970."""
        self._columns: dict[str, array[float]] = {}
        self.evals: list[dict[str, Any]] = []
        self.alarms: list[dict[str, Any]] = []
        self.problems: list[str] = []

    @property
    def last_step(self) -> int:
        """The last logged step; 0 before the first."""
        return self.steps[-1] if self.steps else 0

    def refresh(self) -> None:
        """Read the lines that were added to the files."""
        logs = ((self._lines, self._take), (self._alarm_lines, self._take_alarm))
        if any(lines.was_rewritten() for lines, _ in logs):
            for lines, _ in logs:
                lines.restart()
            self._clear()
            self.generation += 1
        for lines, take in logs:
            try:
                for place, line in lines.new_lines():
                    take(place, line)
            except OSError as error:
                self._complain(f"{lines.path.name} cannot be read: {error.strerror or error}")

    def answer(self, after: int | None = None) -> dict[str, Any]:
        """Return the answer of the API: the metrics of the steps after `after`, or of all steps if `after` is None, and
        always all evaluations and alarms."""
        first = 0
        if after is not None:
            first = next((place for place, step in enumerate(self.steps) if step > after), len(self.steps))
        return {
            "generation": self.generation,
            "steps": self.steps[first:],
            "columns": {name: column[first:].tolist() for name, column in self._columns.items()},
            "evals": self.evals,
            "alarms": self.alarms,
            "names": self._names(),
        }

    def _names(self) -> dict[str, dict[str, str]]:
        """The unit and meaning of each of the run's metrics, if known."""
        evals = (name for each in self.evals for name in each["metrics"])
        new = [name for name in dict.fromkeys([*self._columns, *evals]) if name not in self._looked_up]
        self._looked_up.update(new)
        self._named |= descriptions(new)
        return self._named

    def _take(self, place: int, line: bytes) -> None:
        record = self._content("metrics.jsonl", place, line)
        if record is None:
            return
        metrics = record.get("metrics")
        if not isinstance(metrics, dict) or type(record.get("step")) is not int:
            self._complain(f"metrics.jsonl, byte {place:,}: not a record of metrics")
            return
        if record.get("kind") == "eval":
            found = {name: _number(value) for name, value in metrics.items()}
            self.evals.append(
                {
                    "step": record["step"],
                    "env": str(record.get("env")),
                    "metrics": {**found, "intervals": intervals(metrics)},
                }
            )
            return
        self.steps.append(record["step"])
        self.times.append(_number(record.get("time")))
        for name, value in metrics.items():
            if name not in self._columns and len(self._columns) < _MOST_COLUMNS:
                self._columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
            if name in self._columns:
                number = _number(value)
                self._columns[name].append(math.nan if number is None else number)
        for column in self._columns.values():
            if len(column) < len(self.steps):
                column.append(math.nan)

    def _take_alarm(self, place: int, line: bytes) -> None:
        alarm = self._content("alarms.jsonl", place, line)
        if alarm is None:
            return
        if isinstance(alarm.get("name"), str) and isinstance(alarm.get("step"), int):
            self.alarms.append({k: cut(value) if isinstance(value, str) else value for k, value in alarm.items()})
        else:
            self._complain(f"alarms.jsonl, byte {place:,}: not an alarm")

    def _content(self, name: str, place: int, line: bytes) -> dict[str, Any] | None:
        """The record of a line. If Verbatim did not write the line, add a problem and return None."""
        try:
            return content_of(name, json.loads(line), f"{name}, byte {place:,},")
        except FormatError as error:
            self._complain(str(error))
        except (ValueError, RecursionError):
            self._complain(f"{name}, byte {place:,}: not JSON")
        return None

    def _complain(self, problem: str) -> None:
        if len(self.problems) < 20 and problem not in self.problems:
            self.problems.append(problem)


def intervals(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """The 95% intervals that were logged with an evaluation, computed over its examples."""
    found: dict[str, list[float]] = {}
    for name, stem in (("success", "success"), ("reward/mean", "reward")):
        low, high = (_number(metrics.get(f"{stem}/{end}")) for end in ("low", "high"))
        if low is not None and high is not None:
            found[name] = [low, high]
    return found


def _number(value: Any) -> float | None:
    """The value as a float if it is a finite number; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
