"""Makes what watches a run from [monitor.alarms]."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from verbatim.config import dump_config, resolve
from verbatim.config.alarms import AlarmConfig
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.core.redaction import redacted
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms import ALARMS, AlarmWatch, Rule
from verbatim.logs.monitors.alarms.entropy import EntropyCollapse
from verbatim.logs.monitors.alarms.parting import RewardSuccessGap
from verbatim.logs.monitors.alarms.reward_hacking import RewardHacking
from verbatim.logs.monitors.alarms.watch import KEPT_EVALUATIONS, KEPT_STEPS
from verbatim.run.tables import component_tables


def make_watch(config: RunConfig) -> AlarmWatch | None:
    """Every alarm from `ALARMS` and of the file that is not switched off; None where none is looked for.

    Raises:
        UsageError: one of them refuses its knobs.
    """
    section, table = config.monitor.alarms, component_tables().alarms
    if not section.enabled:
        return None
    components = {name: AlarmConfig(type=name) for name in table} | section.components
    rules = {
        name: resolve(component, table, what="alarm", where=f"monitor.alarms.{name}")
        for name, component in components.items()
        if component.enabled
    }
    for name, rule in rules.items():
        _refuse_silent(name, rule)
    return AlarmWatch(rules, config=redacted(tomllib.loads(dump_config(config))), stop=section.stop)


def _refuse_silent(name: str, rule: Rule) -> None:
    """Refuse a knob with which an alarm could never be raised: more steps than a window holds (a rule that compares
    steps needs as many earlier ones), or so few that no change of them is sure (`change.SURE`)."""
    own: Mapping[str, Any] = vars(rule) if type(rule) in ALARMS.values() else {}
    fewest = _FEWEST_SURE if isinstance(rule, RewardHacking | RewardSuccessGap) else 1
    compares = isinstance(rule, RewardHacking | RewardSuccessGap | EntropyCollapse)
    bounds = {"steps": (fewest, KEPT_STEPS // 2 if compares else KEPT_STEPS), "evaluations": (1, KEPT_EVALUATIONS)}
    for knob, (low, high) in bounds.items():
        if knob in own and not low <= own[knob] <= high:
            raise UsageError(
                f"monitor.alarms.{name}.{knob}: found {own[knob]}, expected {low} to {high}: beyond that "
                "the alarm could never be raised"
            )


_FEWEST_SURE = 7
"""Fewer steps prove too little: 6 steps all stand apart from 6 others by chance once in C(12, 6) = 924 times, which is
more often than once in 1,000."""


def sentence(alarm: Alarm) -> str:
    """An alarm as the last message of a run that it ended."""
    return (
        f"{alarm.name} at step {alarm.step}: {alarm.message}. Most likely: {alarm.cause}. What to do: "
        f"{alarm.advice}. [monitor.alarms] stop names it; --resume goes on"
    )
