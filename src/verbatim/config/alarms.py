"""Defines [monitor.alarms]: which alarms are active, their parameters, and which of them end a run."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from verbatim.config.sections import ComponentConfig, NamedComponents


class AlarmConfig(ComponentConfig):
    """One alarm: a name from `ALARMS` or an import path, and its parameters."""

    enabled: bool = Field(default=True, exclude_if=lambda enabled: enabled)
    """False switches this alarm off."""


class AlarmsConfig(NamedComponents):
    """The alarms of a run. Every key other than the fields below is the name of an alarm: `NAME = false` switches the
    alarm off, a table `[monitor.alarms.NAME]` sets its parameters, and a table with a `type` adds an alarm of your
    own."""

    __pydantic_extra__: dict[str, AlarmConfig] = Field(init=False)

    enabled: bool = True
    """False switches off all alarms. A built-in alarm (`ALARMS`) that has no table in the configuration uses its
    defaults."""
    stop: tuple[str, ...] = ()
    """Names of alarms that end the run when raised; the run writes a checkpoint and exits with status 4."""

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        # `NamedComponents` passes Python values on, and strict validation of Python values rejects a list for a tuple.
        return tuple(value) if isinstance(value, list) else value

    @classmethod
    def _table(cls, key: str, value: Any) -> Any:
        return super()._table(key, {"enabled": value} if isinstance(value, bool) else value)

    @property
    def components(self) -> dict[str, AlarmConfig]:
        """The alarms configured in the file, by key, including disabled alarms."""
        return dict(self.__pydantic_extra__)
