"""Series of steps for the alarms: written down as columns, and shown to a rule step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verbatim.logs.monitors.alarms import ALARMS, AlarmWatch, StepFigures, Window
from verbatim.logs.monitors.alarms.engine import KEPT_FIRST, KEPT_STEPS
from verbatim.logs.monitors.alarms.rule import Finding

Column = float | Sequence[float | None]


def at(column: Column, index: int) -> float | None:
    return column if isinstance(column, int | float) else column[index]


def steps_of(
    metrics: Mapping[str, Column] | None = None,
    env: Mapping[str, Column] | None = None,
    *,
    count: int | None = None,
    name: str = "game",
    errors: Sequence[Mapping[str, int]] | None = None,
) -> list[StepFigures]:
    """The steps 1, 2, ...: a column has one value for each, or one for all of them."""
    lists = [c for c in [*(metrics or {}).values(), *(env or {}).values()] if not isinstance(c, int | float)]
    length = count or len(lists[0])
    assert all(len(column) == length for column in lists)

    def row(columns: Mapping[str, Column] | None, index: int) -> dict[str, float]:
        found = {key: at(column, index) for key, column in (columns or {}).items()}
        return {key: value for key, value in found.items() if value is not None}

    return [
        StepFigures(
            step=index + 1,
            metrics=row(metrics, index),
            envs={name: row(env, index)} if env else {},
            errors={name: dict(errors[index])} if errors else {},
        )
        for index in range(length)
    ]


def window_of(steps: Sequence[StepFigures], **fields: Any) -> Window:
    """The window after the last of these steps."""
    return Window(steps=steps[-KEPT_STEPS:], first=steps[:KEPT_FIRST], **fields)


def findings(
    name: str, steps: Sequence[StepFigures], config: Mapping[str, Any] | None = None, **parameters: Any
) -> list[Finding]:
    """What an alarm's rule finds after the last step."""
    row = ALARMS[name]
    return list(
        replace(row, parameters={**row.parameters, **parameters})(window_of(steps, config=nested(config or {})))
    )


def level(name: str, steps: Sequence[StepFigures], config: Mapping[str, Any] | None = None, **parameters: Any) -> float:
    """The largest level that it finds; 0 where it finds nothing."""
    return max((finding.level for finding in findings(name, steps, config, **parameters)), default=0.0)


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables."""
    tables: dict[str, Any] = {}
    for key, value in config.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def told(
    steps: Sequence[StepFigures], *names: str, config: Mapping[str, Any] | None = None
) -> list[tuple[int, str, str]]:
    """Step, name and state of every alarm that these steps raise and clear, of all kinds or of these."""
    rules = {name: ALARMS[name] for name in names or ALARMS}
    watch = AlarmWatch(rules, config=nested(config or {}))
    return [(alarm.step, alarm.name, alarm.state) for figures in steps for alarm in watch.observe(figures)]
