"""An alarm that is read back is the one that was written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from verbatim.core.errors import UsageError
from verbatim.logs.monitors import Alarm, AlarmLog, read_alarms
from verbatim.logs.monitors.alarm_log import is_alarm, standing_alarms

RAISED = Alarm(
    name="reward_hacking",
    step=12,
    state="raised",
    message="the reward rises, and lengths too",
    cause="a weak grader",
    advice="read trajectory a",
    evidence={"completion_tokens": 512.0, "mismatch_kl": math.inf},
    env="game",
    trajectory_ids=("a", "b"),
)
CLEARED = Alarm(name="reward_hacking", step=20, state="cleared", message="lengths fell", cause="", advice="")


def test_alarms_are_one_line_each_with_their_fields(tmp_path: Path):
    path = tmp_path / "alarms.jsonl"
    log = AlarmLog(path)
    log.on_alarm(RAISED)
    log.on_alarm(CLEARED)
    log.close()
    assert json.loads(path.read_text().splitlines()[0]) == {
        "format": 1,
        "name": "reward_hacking",
        "step": 12,
        "state": "raised",
        "message": "the reward rises, and lengths too",
        "cause": "a weak grader",
        "advice": "read trajectory a",
        "evidence": {"completion_tokens": 512.0, "mismatch_kl": "Infinity"},
        "env": "game",
        "trajectory_ids": ["a", "b"],
    }
    assert read_alarms(path) == [RAISED, CLEARED]


def test_a_run_without_alarms_has_none(tmp_path: Path):
    assert read_alarms(tmp_path / "alarms.jsonl") == []


@pytest.mark.parametrize(
    "record",
    [
        None,
        3,
        [],
        {},
        {"name": "x"},
        {"name": "x", "step": "3", "state": "raised", "message": "", "cause": "", "advice": ""},
        {"name": "x", "step": 3, "state": "up", "message": "", "cause": "", "advice": ""},
        {"name": "x", "step": 3, "state": "raised", "message": "", "cause": "", "advice": "", "evidence": 7},
    ],
)
def test_another_record_is_no_alarm(record: object):
    assert not is_alarm(record)


def test_a_damaged_log_is_named(tmp_path: Path):
    path = tmp_path / "alarms.jsonl"
    path.write_text("nonsense\n")
    with pytest.raises(UsageError, match=r"alarms.jsonl:1: expected a JSON object"):
        read_alarms(path)


def test_what_stands_was_raised_and_not_cleared_since():
    said = [
        ("a", None, "raised"),
        ("b", "game", "raised"),
        ("a", None, "cleared"),
        ("b", "other", "raised"),
        ("a", None, "raised"),
        ("b", "other", "cleared"),
    ]
    alarms = [
        Alarm(name=name, step=step, state=state, message="", cause="", advice="", env=env)
        for step, (name, env, state) in enumerate(said, start=1)
    ]
    found = [(alarm.name, alarm.env, alarm.step) for alarm in standing_alarms(alarms)]
    assert found == [("b", "game", 2), ("a", None, 5)]
