"""Writes a run's alarms as JSON lines, and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verbatim.core.formats import content_of, stamped
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.jsonl import JsonlLog, read_log
from verbatim.logs.monitors.monitor import Monitor

ALARMS = "alarms.jsonl"


class AlarmLog(JsonlLog, Monitor):
    """Writes one JSON object per alarm, with the alarm's fields."""

    def on_alarm(self, alarm: Alarm) -> None:
        self.writer.write(stamped(ALARMS, vars(alarm)))


def alarm_from_json(record: Mapping[str, Any]) -> Alarm:
    """Convert a record of `alarms.jsonl`, as returned by `read_log`, to an alarm.

    Raises:
        KeyError, TypeError, ValueError: the record is not an alarm.
    """
    if record["state"] not in ("raised", "cleared"):
        raise ValueError(f'state: found {record["state"]!r}, expected "raised" or "cleared"')
    evidence = {name: float(value) for name, value in record["evidence"].items()}
    fields = {**record, "evidence": evidence, "trajectory_ids": tuple(record["trajectory_ids"])}
    return Alarm(**fields)


def read_alarms(path: Path) -> list[Alarm]:
    """Read the alarms in an `alarms.jsonl`, in order; empty if there is no such file.

    Raises:
        UsageError: a line is not a JSON object.
        KeyError, TypeError, ValueError: a line is not an alarm.
    """
    return [alarm_from_json(record) for record in read_log(path, ALARMS)] if path.is_file() else []


def standing_alarms(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Alarms that were raised and have not been cleared, in the order in which they were last raised."""
    found: dict[tuple[str, str | None], Alarm] = {}
    for alarm in alarms:
        found.pop((alarm.name, alarm.env), None)
        if alarm.state == "raised":
            found[alarm.name, alarm.env] = alarm
    return list(found.values())


def is_alarm(record: Any) -> bool:
    """True if a JSON value is a record written by `AlarmLog`."""
    try:
        return type(alarm_from_json(content_of(ALARMS, record, ALARMS)).step) is int
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
