"""Reads what a run folder says of its run: also of one that is under way, or that failed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.config.origins import dotted, line_numbers
from verbatim.core.disk import open_regular
from verbatim.core.errors import CheckpointError, FormatError, UsageError
from verbatim.core.formats import content_of
from verbatim.core.redaction import redacted_at
from verbatim.inspection.viewer.run_state import check_run, read_config, read_state, read_text
from verbatim.logs.checkpoints.hold import ORCHESTRATOR
from verbatim.logs.checkpoints.json_files import read_record
from verbatim.logs.checkpoints.origin import Origin, read_origin
from verbatim.logs.checkpoints.stored_config import CONFIG, leaves
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarm_log import alarm_from_json
from verbatim.run.evaluation.stored import evaluated_steps

Metrics = Mapping[str, float]

_STARTED = re.compile(r"^\S+ \S+ INFO started \(process \d+\)$")
_CHANGED = re.compile(r" WARNING the configuration changed since this run started: (.+)$")
_NO_PART = ("name", "run_dir")
"""Keys that say nothing of how a run trains."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a run's configuration."""

    value: Any
    """Without secrets, to be shown."""
    stored: Any = field(repr=False)
    """As it stands there, to be compared: two keys may look the same without secrets."""
    line: int | None
    """Where it stands in the stored configuration."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One run, as its folder is now."""

    folder: Path
    name: str
    state: str
    """"running", "finished", "stopped" (it can be resumed), "failed" (its log ends with an error) or "unknown"."""
    max_steps: int | None
    num_starts: int
    """How often a process of it began: more than 1 = it was resumed."""
    config: Mapping[str, Setting]
    """By dotted key."""
    changed: Sequence[str]
    """The keys that a resume changed, as the log has them: "key: before -> after"."""
    forked_from: Origin | None
    """The run that it was forked from, and at which step."""
    steps: Mapping[int, Metrics]
    """Metrics by step."""
    times: Mapping[int, float]
    """When each step was logged, in seconds since 1970."""
    evals: Mapping[str, Mapping[int, Metrics]]
    """Metrics of evaluations by environment and step."""
    alarms: Sequence[Alarm]
    kept_evals: Sequence[int]
    """Steps whose evaluated episodes are kept."""
    seconds: float | None
    """What the run says that it took, where it is finished."""
    problems: Sequence[str] = field(default_factory=tuple)
    """What could not be read, as sentences."""

    @property
    def last_step(self) -> int:
        """Steps that are logged."""
        return max(self.steps, default=0)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Step and value wherever a step has a finite one."""
        found = [(step, metrics[metric]) for step, metrics in self.steps.items() if metric in metrics]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def eval_series(self, env: str, metric: str) -> list[tuple[int, float]]:
        """The same of the evaluations of an environment."""
        found = [(step, metrics[metric]) for step, metrics in self.evals.get(env, {}).items() if metric in metrics]
        return [(step, value) for step, value in found if math.isfinite(value)]


def read_run(folder: Path) -> Run:
    """The run in a folder. What is damaged in it is left out, and told in `problems`.

    Raises:
        UsageError: there is no run; says what was found, and which runs are near.
    """
    check_run(folder, "verbatim compare", (CONFIG, "metrics.jsonl", "checkpoints"))
    problems: list[str] = []
    folder_state, config, text = read_state(folder), read_config(folder), _text(folder / CONFIG)
    if not config:
        problems.append(f"{CONFIG} is missing or damaged: its keys are not compared")
    steps, times, evals = _read_metrics(folder / "metrics.jsonl", problems)
    log = _text(folder / "logs" / f"{ORCHESTRATOR}.log").splitlines()
    lines = {dotted(path): line for path, line in line_numbers(text).items()} if config else {}
    seconds = _summary(folder, problems).get("seconds")
    return Run(
        folder=folder,
        name=folder_state.name,
        state=folder_state.state,
        max_steps=folder_state.max_steps,
        num_starts=sum(bool(_STARTED.match(line)) for line in log),
        config={
            key: Setting(value=redacted_at(key, value), stored=value, line=lines.get(key))
            for key, value in leaves(config)
            if key not in _NO_PART
        },
        changed=list(dict.fromkeys(found[1] for line in log if (found := _CHANGED.search(line)))),
        forked_from=_origin(folder, problems),
        steps=steps,
        times=times,
        evals=evals,
        alarms=_read_alarms(folder / "alarms.jsonl", problems),
        kept_evals=evaluated_steps(folder),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        problems=problems,
    )


def _origin(folder: Path, problems: list[str]) -> Origin | None:
    try:
        return read_origin(folder)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _read_metrics(
    path: Path, problems: list[str]
) -> tuple[dict[int, Metrics], dict[int, float], dict[str, dict[int, Metrics]]]:
    """Metrics by step, when they were logged, and those of evaluations."""
    steps: dict[int, Metrics] = {}
    times: dict[int, float] = {}
    evals: dict[str, dict[int, Metrics]] = {}
    if not path.is_file():
        problems.append("it has no metrics.jsonl yet")
        return steps, times, evals
    bad = 0
    for record in _records(path, problems):
        try:
            step, metrics = int(record["step"]), {name: float(value) for name, value in record["metrics"].items()}
            if record["kind"] == "eval":
                if metrics.get("episodes") != 0:  # it was left out
                    evals.setdefault(str(record["env"]), {})[step] = metrics
            else:
                steps[step], times[step] = metrics, float(record.get("time", math.nan))
        except (AttributeError, KeyError, TypeError, ValueError):
            bad += 1
    if bad:
        problems.append(f"{bad} lines of metrics.jsonl cannot be read, and are left out")
    return steps, times, evals


def _read_alarms(path: Path, problems: list[str]) -> list[Alarm]:
    found, bad = [], 0
    for record in _records(path, problems) if path.is_file() else ():
        try:
            found.append(alarm_from_json(record))
        except (AttributeError, KeyError, TypeError, ValueError):
            bad += 1
    if bad:
        problems.append(f"{bad} lines of alarms.jsonl cannot be read, and are left out")
    return found


def _records(path: Path, problems: list[str]) -> list[Any]:
    """The record of each whole line of a log; None for a line that has none, and a problem where it is of another
    version. A torn last line is still being written."""
    records: list[Any] = []
    others: list[str] = []
    try:
        opened = open_regular(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    with opened as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                try:
                    records.append(content_of(path.name, json.loads(line), f"line {number} of {path.name}"))
                except (ValueError, RecursionError) as error:
                    records.append(None)
                    others += [str(error)] if isinstance(error, FormatError) else []
    problems += others[:1]
    return records


def _summary(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    path = folder / "summary.json"
    try:
        return read_record(path) if path.exists() else {}
    except CheckpointError as error:
        problems.append(str(error))
        return {}


def _text(path: Path) -> str:
    try:
        return read_text(path, "replace")
    except OSError:
        return ""


def alarm_counts(run: Run) -> dict[str, tuple[int, bool]]:
    """How often each alarm was raised, and whether it still is, by its name and environment."""
    counts: Counter[str] = Counter()
    raised: dict[str, bool] = {}
    for alarm in run.alarms:
        name = alarm.name if alarm.env is None else f"{alarm.name} ({alarm.env})"
        counts[name] += alarm.state == "raised"
        raised[name] = alarm.state == "raised"
    return {name: (count, raised[name]) for name, count in counts.most_common()}
