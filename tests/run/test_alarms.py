"""Which parameters of alarms are refused because the alarm could never be raised."""

from __future__ import annotations

from typing import Any

import pytest

from verbatim.config import make_config
from verbatim.core.errors import UsageError
from verbatim.logs.monitors.alarms.change import SURE, chance_of_rise
from verbatim.run.alarms import make_watch
from verbatim.run.tables import component_tables


def watch_with(alarms: dict[str, Any]) -> object:
    return make_watch(
        make_config(
            {
                "model": {"name": "m"},
                "max_steps": 1,
                "orchestrator": {"train": {"env": [{"id": "guess_number"}]}},
                "monitor": {"alarms": alarms},
            },
            tables=component_tables(),
        )
    )


@pytest.mark.parametrize(
    ("name", "parameter", "last", "beyond"),
    [
        ("mismatch_kl", "steps", 48, 49),
        ("entropy_collapse", "steps", 24, 25),
        ("reward_hacking", "steps", 24, 25),
        ("reward_hacking", "steps", 7, 6),
        ("reward_success_gap", "steps", 7, 6),
        ("evaluation_flat", "evaluations", 32, 33),
    ],
)
def test_a_parameter_with_which_an_alarm_is_silent_is_refused(name: str, parameter: str, last: int, beyond: int):
    assert watch_with({name: {parameter: last}}) is not None
    with pytest.raises(UsageError, match=rf"monitor.alarms.{name}.{parameter}: found {beyond}, expected "):
        watch_with({name: {parameter: beyond}})
    assert watch_with({name: {parameter: beyond, "enabled": False}}) is not None


def test_the_fewest_steps_that_can_be_sure_are_7():
    assert [chance_of_rise([0.0] * n, [1.0] * n) <= SURE for n in (6, 7)] == [False, True]
