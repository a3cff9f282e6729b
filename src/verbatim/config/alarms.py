"""Defines [monitor.alarms]: which alarms are looked for, with which parameters, and which of them end a run."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from verbatim.config.sections import ComponentConfig, NamedComponents


class AlarmConfig(ComponentConfig):
    """One alarm: a name from `ALARMS` or an import path, and its parameters."""

    enabled: bool = Field(default=True, exclude_if=lambda enabled: enabled)
    """Whether it is looked for."""


class AlarmsConfig(NamedComponents):
    """What a run is watched for. Every other key is an alarm: `NAME = false` switches one off, a table
    `[monitor.alarms.NAME]` sets its parameters, and with a `type` it is one of your own."""

    __pydantic_extra__: dict[str, AlarmConfig] = Field(init=False)

    enabled: bool = True
    """Whether any is looked for; without a table of their own those from `ALARMS` are, with their defaults."""
    stop: tuple[str, ...] = ()
    """Names of alarms that end the run when they are raised, with a checkpoint and exit status 4."""

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return (
            tuple(value) if isinstance(value, list) else value
        )  # the section has made Python of JSON, whose lists were tuples

    @classmethod
    def _table(cls, key: str, value: Any) -> Any:
        return super()._table(key, {"enabled": value} if isinstance(value, bool) else value)

    @property
    def components(self) -> dict[str, AlarmConfig]:
        """The alarms that the file names, by key; those that are switched off too."""
        return dict(self.__pydantic_extra__)
