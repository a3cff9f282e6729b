"""Reads a run from its folder, even if the run is in progress or has failed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.config.key_locations import dotted, leaves, line_numbers
from verbatim.core.errors import CheckpointError
from verbatim.core.redaction import redacted_at
from verbatim.inspection.viewer.metrics import MetricsFollower
from verbatim.inspection.viewer.run_state import check_run, origin_in, read_config, read_state, read_text
from verbatim.logs.checkpoints.hold import ORCHESTRATOR
from verbatim.logs.checkpoints.json_files import read_record
from verbatim.logs.checkpoints.origin import Origin
from verbatim.logs.checkpoints.stored_config import CONFIG
from verbatim.run.evaluation.stored import evaluation_files

Metrics = Mapping[str, float]

_STARTED = re.compile(r"^\S+ \S+ INFO started \(process \d+\)$")
_CHANGED = re.compile(r" WARNING the configuration changed since this run started: (.+)$")
_NO_PART = ("name", "run_dir")
"""Keys that are not compared, because they do not affect training."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a run's configuration."""

    value: Any
    """The value to display, with secrets redacted."""
    stored: Any = field(repr=False)
    """The original value, which is needed for comparisons because two different secrets look the same when redacted."""
    line: int | None
    """The line of the key in the stored configuration; None if unknown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One run, as described by the current content of its folder."""

    folder: Path
    name: str
    state: str
    """"running", "finished", "stopped" (can be resumed), "failed" (the log ends with an error) or "unknown"."""
    max_steps: int | None
    num_starts: int
    """Number of times that the run was started; more than 1 if the run was resumed."""
    config: Mapping[str, Setting]
    """The run's settings, by dotted key."""
    changed: Sequence[str]
    """The keys that a resume changed, as logged: "key: before -> after"."""
    forked_from: Origin | None
    """The run and step that this run was forked from; None if it is not a fork."""
    steps: Mapping[int, Metrics]
    """Metrics by step; NaN for a metric that a step lacks."""
    times: Mapping[int, float]
    """The time at which each step was logged, in seconds since 1970."""
    evals: Mapping[str, Mapping[int, Metrics]]
    """Metrics of evaluations by environment and step."""
    alarms: Sequence[Mapping[str, Any]]
    """The fields of each logged alarm, in the order of the log."""
    kept_evals: Sequence[int]
    """The steps whose evaluated episodes are kept."""
    seconds: float | None
    """The duration in seconds that the run reports; None if the run is not finished."""
    problems: Sequence[str] = field(default_factory=tuple)
    """Descriptions of what could not be read."""

    @property
    def last_step(self) -> int:
        """The last logged step; 0 if there is none."""
        return max(self.steps, default=0)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """The pairs (step, value) of all steps in which the metric has a finite value."""
        found = [(step, metrics[metric]) for step, metrics in self.steps.items() if metric in metrics]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def eval_series(self, env: str, metric: str) -> list[tuple[int, float]]:
        """Like `series`, for the evaluations of an environment."""
        found = [(step, metrics[metric]) for step, metrics in self.evals.get(env, {}).items() if metric in metrics]
        return [(step, value) for step, value in found if math.isfinite(value)]


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Damaged parts are skipped and described in `problems`.

    Raises:
        UsageError: the folder has no run; the message says what was found instead, and which runs are nearby.
    """
    check_run(folder, "verbatim compare", (CONFIG, "metrics.jsonl", "checkpoints"))
    problems: list[str] = []
    folder_state, config, text = read_state(folder), read_config(folder), _text(folder / CONFIG)
    if not config:
        problems.append(f"{CONFIG} is missing or damaged: its keys are not compared")
    if not (folder / "metrics.jsonl").is_file():
        problems.append("there is no metrics.jsonl yet")
    metrics = MetricsFollower(folder)
    metrics.refresh()
    problems += metrics.problems
    columns = metrics.answer()["columns"].items()
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
        forked_from=origin_in(folder, problems),
        steps={step: {name: column[row] for name, column in columns} for row, step in enumerate(metrics.steps)},
        times={step: at for step, at in zip(metrics.steps, metrics.times, strict=True) if at is not None},
        evals=_evals(metrics),
        alarms=metrics.alarms,
        kept_evals=list(evaluation_files(folder)),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        problems=problems,
    )


def _evals(log: MetricsFollower) -> dict[str, dict[int, Metrics]]:
    """The metrics of evaluations by environment and step. A null, which the log has in place of NaN, becomes NaN."""
    evals: dict[str, dict[int, Metrics]] = {}
    for each in log.evals:
        metrics = {name: value for name, value in each["metrics"].items() if name != "intervals"}
        if metrics.get("episodes") != 0:  # the evaluation was skipped
            numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
            evals.setdefault(each["env"], {})[each["step"]] = numbers
    return evals


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
    """The number of times that each alarm was raised, and whether it is still raised, by the alarm's name and
    environment."""
    counts: Counter[str] = Counter()
    raised: dict[str, bool] = {}
    for alarm in run.alarms:
        name = alarm["name"] if alarm.get("env") is None else f"{alarm['name']} ({alarm['env']})"
        raised[name] = alarm.get("state") == "raised"
        counts[name] += raised[name]
    return {name: (count, raised[name]) for name, count in counts.most_common()}
