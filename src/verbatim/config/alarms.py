"""Defines [monitor.alarms]: which alarms are looked for, with which knobs, and which of them end a run."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from verbatim.config.sections import ComponentConfig, Section


class AlarmConfig(ComponentConfig):
    """One alarm: a name from `ALARMS` or an import path, and its knobs."""

    enabled: bool = Field(default=True, exclude_if=lambda enabled: enabled)
    """Whether it is looked for."""


class AlarmsConfig(Section):
    """What a run is watched for. Every other key is an alarm: `NAME = false` switches one off, a table
    `[monitor.alarms.NAME]` sets its knobs, and with a `type` it is one of your own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AlarmConfig] = Field(init=False)

    enabled: bool = True
    """Whether any is looked for; without a table of their own those from `ALARMS` are, with their defaults."""
    stop: tuple[str, ...] = ()
    """Names of alarms that end the run when they are raised, with a checkpoint and exit status 4."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_their_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        found = {key: value if key in cls.model_fields else _table(key, value) for key, value in data.items()}
        if isinstance(stop := found.get("stop"), list):
            found["stop"] = tuple(stop)  # behind a "before" validator a list is no tuple any more
        return found

    @property
    def components(self) -> dict[str, AlarmConfig]:
        """The alarms that the file names, by key; those that are switched off too."""
        return dict(self.__pydantic_extra__)


def _table(key: str, value: Any) -> Any:
    if isinstance(value, bool):
        return {"type": key, "enabled": value}
    return {"type": key, **value} if isinstance(value, dict) else value
