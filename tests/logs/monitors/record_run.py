"""Writes down what the alarms keep of every step of a finished run, for `test_alarm_false_ones`.

python tests/logs/monitors/record_run.py runs/calculator/latest calculator
"""

from __future__ import annotations

import gzip
import json
import sys
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

from verbatim.logs.monitors.alarms.figures import error_counts, rollout_figures
from verbatim.logs.monitors.jsonl import read_jsonl
from verbatim.logs.outcomes.files import read_outcomes

OUT = Path(__file__).parent / "recorded_runs"


def finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if abs(value) < float("inf")}


def columns(rows: list[dict[str, float]]) -> dict[str, list[float | None]]:
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def record(run: Path) -> dict[str, Any]:
    """The steps as `AlarmWatch.state_dict` has them, all evaluations, and the configuration that rules read."""
    lines = list(read_jsonl(run / "metrics.jsonl"))
    metrics = {line["step"]: line["metrics"] for line in lines if line["kind"] == "train"}
    steps, envs, errors = [], [], []
    for step, pairs in groupby(read_outcomes(run / "trajectories"), key=lambda pair: pair[0]):
        outcomes = [outcome for _, outcome in pairs]
        steps.append(step)
        envs.append({env: finite(dict(own)) for env, own in rollout_figures(metrics[step], outcomes).items()})
        errors.append({env: dict(counts) for env, counts in error_counts(outcomes).items()})
    config = tomllib.loads((run / "config.toml").read_text())
    return {
        "config": {name: config[name] for name in ("orchestrator", "trainer")},
        "steps": {
            "step": steps,
            "metrics": columns([finite(metrics[step]) for step in steps]),
            "errors": errors,
            "envs": {env: columns([own.get(env, {}) for own in envs]) for env in {e: 0 for own in envs for e in own}},
        },
        "evaluations": [
            [line["step"], line["env"], finite(line["metrics"])] for line in lines if line["kind"] == "eval"
        ],
    }


if __name__ == "__main__":
    data = json.dumps(record(Path(sys.argv[1]))).encode()
    (OUT / f"{sys.argv[2]}.json.gz").write_bytes(gzip.compress(data, mtime=0))
