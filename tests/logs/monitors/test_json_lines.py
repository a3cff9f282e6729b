"""A run for programs: every line is one JSON object."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys

import pytest

from verbatim.logs.monitors import Alarm
from verbatim.logs.monitors.json_lines import JsonLines


def test_steps_evaluations_alarms_and_the_end_are_one_line_each():
    out = io.StringIO()
    monitor = JsonLines(out)
    monitor.on_eval(0, "game", {"success": 0.25})
    monitor.on_step(1, {"loss": math.inf, "reward/mean": math.nan}, {"distribution/reward": [1.0]})
    monitor.on_alarm(
        Alarm(
            name="stale",
            step=1,
            state="raised",
            message="m",
            cause="c",
            advice="a",
            evidence={"staleness/mean": 9.0},
            trajectory_ids=("t",),
        )
    )
    monitor.on_end({"state": "finished", "steps": 1, "results": {"gain_interval_95": [0.1, 0.2]}})
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"kind": "eval", "step": 0, "env": "game", "metrics": {"success": 0.25}},
        {"kind": "step", "step": 1, "metrics": {"loss": "Infinity", "reward/mean": "NaN"}},
        {
            "kind": "alarm",
            "name": "stale",
            "step": 1,
            "state": "raised",
            "message": "m",
            "cause": "c",
            "advice": "a",
            "evidence": {"staleness/mean": 9.0},
            "env": None,
            "trajectory_ids": ["t"],
        },
        {"kind": "end", "state": "finished", "steps": 1, "results": {"gain_interval_95": [0.1, 0.2]}},
    ]


def test_a_reader_that_goes_ends_no_run(caplog):
    reading, writing = os.pipe()
    monitor = JsonLines(os.fdopen(writing, "w", encoding="utf-8"))
    monitor.on_step(1, {"loss": 1.0})
    os.close(reading)
    with caplog.at_level(logging.WARNING):
        monitor.on_step(2, {"loss": 0.5})
        monitor.on_end({"state": "finished"})
    assert [record.getMessage() for record in caplog.records] == [
        "the program that read the run's JSON lines has exited; the run goes on without it"
    ]


@pytest.mark.realtime
def test_a_program_ends_well_though_its_reader_has_gone():
    """As `verbatim rl ... --json | head -1`: lines that no one takes are still in the stream as it is closed."""
    program = """
from verbatim.cli.own_stdout import own_stdout
from verbatim.logs.monitors.json_lines import JsonLines
import sys
with own_stdout() as stdout:
    monitor = JsonLines(stdout)
    monitor.on_step(1, {})
    sys.stdin.read()
    monitor.on_step(2, {})
    monitor.on_end({})
"""
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None and running.stdin is not None and running.stderr is not None
    assert json.loads(running.stdout.readline())["step"] == 1
    running.stdout.close()
    running.stdin.close()
    said = running.stderr.read()
    assert (running.wait(), "Error" in said) == (0, False), said
