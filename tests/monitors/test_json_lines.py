"""A run for programs: every line is one JSON object."""

from __future__ import annotations

import io
import json
import math

from verbatim.monitors import Alarm
from verbatim.monitors.json_lines import JsonLines


def test_steps_evaluations_alarms_and_the_end_are_one_line_each():
    out = io.StringIO()
    monitor = JsonLines(out)
    monitor.on_eval(0, "game", {"success": 0.25})
    monitor.on_step(1, {"loss": math.inf, "reward/mean": math.nan}, {"distribution/reward": [1.0]})
    monitor.on_alarm(Alarm(name="stale", step=1, state="raised", message="m", cause="c", advice="a",
                           evidence={"staleness/mean": 9.0}, trajectory_ids=("t",)))  # fmt: skip
    monitor.on_end({"state": "finished", "steps": 1, "results": {"gain_interval_95": [0.1, 0.2]}})
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"kind": "eval", "step": 0, "env": "game", "metrics": {"success": 0.25}},
        {"kind": "step", "step": 1, "metrics": {"loss": "Infinity", "reward/mean": "NaN"}},
        {"kind": "alarm", "name": "stale", "step": 1, "state": "raised", "message": "m", "cause": "c", "advice": "a",
         "evidence": {"staleness/mean": 9.0}, "env": None, "trajectory_ids": ["t"]},
        {"kind": "end", "state": "finished", "steps": 1, "results": {"gain_interval_95": [0.1, 0.2]}},
    ]  # fmt: skip
