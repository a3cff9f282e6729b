"""Builds the alarms of a run from [monitor.alarms]."""

from __future__ import annotations

import tomllib

from verbatim.config import dump_config, resolve
from verbatim.config.alarms import AlarmConfig
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.core.redaction import redacted
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms import AlarmRow, AlarmWatch
from verbatim.run.tables import component_tables


def make_watch(config: RunConfig) -> AlarmWatch | None:
    """All enabled alarms: the built-in alarms (`ALARMS`) and the alarms added in the configuration; None if
    [monitor.alarms] is off.

    Raises:
        UsageError: an alarm rejects its parameters, or could never be raised with them.
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
        for parameter, (low, high) in rule.limits.items() if isinstance(rule, AlarmRow) else ():
            if not low <= rule.parameters[parameter] <= high:
                raise UsageError(
                    f"monitor.alarms.{name}.{parameter}: found {rule.parameters[parameter]}, expected {low} to {high}: "
                    "outside this range the alarm could never be raised"
                )
    return AlarmWatch(rules, config=redacted(tomllib.loads(dump_config(config))), stop=section.stop)


def sentence(alarm: Alarm) -> str:
    """The final message of a run that was stopped by this alarm."""
    return (
        f"{alarm.name} at step {alarm.step}: {alarm.message}. Most likely: {alarm.cause}. What to do: "
        f"{alarm.advice}. It is listed in [monitor.alarms] stop; --resume continues the run"
    )
