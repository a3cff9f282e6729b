"""Dotted command-line overrides: `--orchestrator.batch-size 64` sets one key of the document.

Keys are in kebab or snake case, list elements are named by their index. A value is read as TOML, then as
JSON, then as plain text; it replaces what was there. `null` unsets a key, so that its default applies.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.config.origins import KeyPath
from verbatim.errors import ConfigError

UNSET = "null"
"""The value that removes a key."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override as it was typed."""

    flag: str
    """`--orchestrator.batch-size`."""
    text: str | None
    """What follows; None where nothing does, which means `true` for a boolean."""

    def __str__(self) -> str:
        return self.flag if self.text is None else f"{self.flag} {self.text}"

    @property
    def parts(self) -> list[str]:
        """The keys between the dots, as typed."""
        return self.flag.removeprefix("--").split(".")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """`["--a.b", "1", "--c=2"]` as overrides, in order.

    Raises:
        ConfigError: something that is no override, or a key with an empty part.
    """
    found: list[Override] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, text = argument.partition("=")
        override = Override(flag=flag, text=text if equals else None)
        if not argument.startswith("--") or not all(override.parts):
            raise ConfigError(f"found {argument!r}, expected an override such as --orchestrator.batch-size 64")
        if not equals and rest and not rest[0].startswith("--"):
            override = Override(flag=flag, text=rest.pop(0))
        found.append(override)
    return found


def parse_value(text: str) -> Any:
    """A TOML value, a JSON value, or else the text itself.

    >>> parse_value("0.5"), parse_value("[1, 2]"), parse_value('{"a": 1}'), parse_value("{a = 1}"), parse_value("x/y")
    (0.5, [1, 2], {'a': 1}, {'a': 1}, 'x/y')
    """
    for parse in (_parse_toml, _parse_json):
        try:
            return parse(text)
        except ValueError:
            continue  # not in this notation
    return text


def _parse_toml(text: str) -> Any:
    document = tomllib.loads(f"value = {text}")
    value = document.pop("value")
    if document or not isinstance(value, bool | int | float | str | list | dict):
        raise ValueError("several statements, or a date")
    return value


def _parse_json(text: str) -> Any:
    # TOML has no null: an unset key of an object is one that is not there.
    return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})


def apply_override(document: dict[str, Any], override: Override, value: Any) -> KeyPath:
    """Set (or, with the text `null`, remove) the override's key in place, and return its path.

    Missing tables on the way are made, and so is the list element after the last one.

    Raises:
        ConfigError: the way leads through a plain value, or past the end of a list.
    """
    path: KeyPath = ()
    container: Any = document
    parts = override.parts
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        key = _key(container, part, path, override)
        path = (*path, key)
        if following is not None:
            present = key in container if isinstance(container, dict) else key != len(container)
            if override.text == UNSET and not present:
                return (*path, *(name.replace("-", "_") for name in parts[len(path) :]))
            empty: Any = [] if following.isdecimal() else {}
            if isinstance(container, list):
                if key == len(container):
                    container.append(empty)
                container = container[int(key)]
            else:
                container = container.setdefault(key, empty)
        elif override.text == UNSET:
            if isinstance(container, dict):
                container.pop(key, None)
            elif int(key) < len(container):
                container.pop(int(key))
        elif isinstance(container, list) and key == len(container):
            container.append(value)
        else:
            container[key] = value
    return path


def _key(container: Any, part: str, path: KeyPath, override: Override) -> str | int:
    name = ".".join(map(str, path))
    if isinstance(container, dict):
        return part if part in container else part.replace("-", "_")
    if not isinstance(container, list):
        raise ConfigError(f"{override}: {name} is {json.dumps(container)}, which has no keys")
    if not part.isdecimal() or int(part) > len(container):
        raise ConfigError(f"{override}: {name} is a list of {len(container)}; expected an index from 0 to "
                          f"{len(container)}, found {part!r}")  # fmt: skip
    return int(part)
