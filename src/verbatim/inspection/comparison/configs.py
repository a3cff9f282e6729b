"""Finds the configuration keys whose values differ between runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from verbatim.config.fields import field_at
from verbatim.config.schema import RunConfig
from verbatim.inspection.comparison.read_run import Run


@dataclass(frozen=True, kw_only=True)
class ConfigDifference:
    """One key whose value differs between runs."""

    key: str
    values: Sequence[Any]
    """One value per run; None for a run that does not set the key."""
    lines: Sequence[int | None]
    """One line number per run: the line of the key in the run's config.toml; None if unknown."""
    default: Any
    """The default, which applies if a file does not set the key; None if the schema has no default."""

    def is_default(self, place: int) -> bool:
        """True if the run at this index has the default value."""
        return self.default is not None and self.values[place] == self.default


def config_differences(runs: Sequence[Run]) -> list[ConfigDifference]:
    """The keys whose values differ, in the order of the first run's file.

    A run without a readable configuration counts as setting no key.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    found = []
    for key in keys:
        settings = [run.config.get(key) for run in runs]
        values = [setting.value if setting is not None else None for setting in settings]
        stored = [setting.stored if setting is not None else None for setting in settings]
        if any(value != stored[0] for value in stored):
            lines = [setting.line if setting is not None else None for setting in settings]
            found.append(ConfigDifference(key=key, values=values, lines=lines, default=_default(key)))
    return found


def _default(key: str) -> Any:
    """The schema's default for a key, as a TOML value; None if there is no default."""
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    field = field_at(RunConfig, path)
    if field is None or field.default is PydanticUndefined:
        return None
    return list(field.default) if isinstance(field.default, tuple) else field.default


def told(differences: Sequence[ConfigDifference]) -> list[ConfigDifference]:
    """Select the differences that are worth showing to people.

    A key is dropped if it has its default value in some runs and is unset in the other runs because these lack the
    key's table. If all keys of a table are dropped, one row `[table]` says which runs have the table.
    """
    found: dict[str, ConfigDifference] = {}
    for each in differences:
        if all(value is None or each.is_default(place) for place, value in enumerate(each.values)):
            table = each.key.rpartition(".")[0]
            there = ["there" if value is not None else None for value in each.values]
            found.setdefault(f"[{table}]", dataclasses.replace(each, key=f"[{table}]", values=there, default=None))
        else:
            found[each.key] = each
    tables = {name.rpartition(".")[0] for name in found if not name.startswith("[")}
    return [each for name, each in found.items() if not name.startswith("[") or name[1:-1] not in tables]
