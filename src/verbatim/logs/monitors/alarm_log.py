"""Writes and reads the alarms of a run as JSON lines."""

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
    """One object for each alarm, with its fields."""

    def on_alarm(self, alarm: Alarm) -> None:
        self.writer.write(stamped(ALARMS, vars(alarm)))


def alarm_from_json(record: Mapping[str, Any]) -> Alarm:
    """The alarm of one line of `alarms.jsonl`, as `read_log` gives it.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if record["state"] not in ("raised", "cleared"):
        raise ValueError(f'state: found {record["state"]!r}, expected "raised" or "cleared"')
    evidence = {name: float(value) for name, value in record["evidence"].items()}
    fields = {**record, "evidence": evidence, "trajectory_ids": tuple(record["trajectory_ids"])}
    return Alarm(**fields)


def read_alarms(path: Path) -> list[Alarm]:
    """The alarms of an `alarms.jsonl`, in order; empty where there is no such file.

    Raises:
        UsageError: a line that is no JSON object.
        TypeError, ValueError: one that is no alarm.
    """
    return [alarm_from_json(record) for record in read_log(path, ALARMS)] if path.is_file() else []


def standing_alarms(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Those that were raised and not cleared since, in the order in which they were raised."""
    found: dict[tuple[str, str | None], Alarm] = {}
    for alarm in alarms:
        found.pop((alarm.name, alarm.env), None)
        if alarm.state == "raised":
            found[alarm.name, alarm.env] = alarm
    return list(found.values())


def is_alarm(record: Any) -> bool:
    """Whether a value is a line that `AlarmLog` writes."""
    try:
        return type(alarm_from_json(content_of(ALARMS, record, ALARMS)).step) is int
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
