"""Parses overrides of a file's keys: command-line options (`--orchestrator.batch-size 64`) and settings in Python.

Option keys may be in kebab or snake case; list elements are addressed by index. A value is parsed as TOML, or else as
JSON, and is otherwise used as plain text; it replaces the value in the file. `null` unsets a key, so that its default
applies.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from verbatim.config.key_locations import KeyPath, dotted
from verbatim.core.errors import ConfigError
from verbatim.core.texts import shown

UNSET = "null"
"""The value that removes a key."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override as typed."""

    flag: str
    """The option as typed, such as `--orchestrator.batch-size`."""
    text: str | None
    """The value as typed, or None if there was none, which means `true` for a boolean."""

    def __str__(self) -> str:
        return self.flag if self.text is None else f"{self.flag} {self.text}"

    @property
    def parts(self) -> list[str]:
        """The keys between the dots, exactly as the user typed them."""
        return self.flag.removeprefix("--").split(".")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Parse `["--a.b", "1", "--c=2"]` into overrides, in order.

    Raises:
        ConfigError: an argument is not an override, or a key has an empty part.
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
    """The value that a string stands for: a TOML value, a JSON value, or the string itself.

    >>> parse_value("0.5"), parse_value("[1, 2]"), parse_value('{"a": 1}'), parse_value("{a = 1}"), parse_value("x/y")
    (0.5, [1, 2], {'a': 1}, {'a': 1}, 'x/y')
    """
    for parse in (_parse_toml, _parse_json):
        try:
            return parse(text)
        except ValueError:
            continue  # the text is not in this notation
    return text


def _parse_toml(text: str) -> Any:
    document = tomllib.loads(f"value = {text}")
    value = document.pop("value")
    if document or not isinstance(value, bool | int | float | str | list | dict):
        raise ValueError("several statements, or a date")  # dates are not configuration values: the text is kept
    return value


def _parse_json(text: str) -> Any:
    # TOML has no null, so a null in a JSON object removes its key, which then gets its default.
    return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})


def apply_override(document: dict[str, Any], override: Override, value: Any) -> KeyPath:
    """Set the override's key in place (or remove it if the value is `null`), and return its path.

    Missing tables on the way are created, and so is a list element directly after the last element.

    Raises:
        ConfigError: the path crosses a plain value, or an index is past the end of a list.
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
                # Unsetting must not create tables. The rest of the path is still returned for the unknown-key check.
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
        raise ConfigError(
            f"{override}: {name} is a list of {len(container)}; expected an index from 0 to "
            f"{len(container)}, found {part!r}"
        )
    return int(part)


def assignments(settings: Mapping[str, Any], caller: str) -> list[tuple[KeyPath, Any]]:
    """The keys set in Python, as pairs of the full path and the value converted to TOML types.

    A dot in a top-level key leads into a table, as in TOML. Paths become strings, tuples become lists, and numpy
    numbers become Python numbers. A value None is kept: it unsets a key.

    >>> assignments({"trainer.optim.lr": 1e-4, "orchestrator": {"filters": (), "group_size": 4}}, "verbatim.run")
    [(('trainer', 'optim', 'lr'), 0.0001), (('orchestrator', 'filters'), []), (('orchestrator', 'group_size'), 4)]

    Raises:
        ConfigError: TOML cannot represent a value; the message names the caller, the key, and what was found.
    """
    try:
        return [item for key, value in settings.items() for item in _leaves(value, tuple(str(key).split(".")))]
    except ConfigError as error:
        raise ConfigError(f"{caller}(): {error}") from None
    except RecursionError:
        raise ConfigError(f"{caller}(): a table or a list contains itself, or is nested too deeply") from None


def assign(document: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the key at `path` in place, or remove it if the value is None. Missing tables on the way are created."""
    *tables, last = map(str, path)
    for name in tables:
        inner = document.get(name)
        if not isinstance(inner, dict):
            inner = document[name] = {}
        document = inner
    if value is None:
        document.pop(last, None)
    else:
        document[last] = value


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, _text_key(key, path)))
    else:
        yield path, None if value is None else _plain(value, path)


def _plain(value: Any, path: KeyPath) -> Any:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{dotted(path)}: found {shown(value, 80)}, expected text that UTF-8 can encode"
            ) from None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_text_key(key, path): _plain(inner, (*path, key)) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, index)) for index, inner in enumerate(value)]
    hint = (
        '; select your own component by its import path: {"type": "my_module.my_function"}' if callable(value) else ""
    )
    raise ConfigError(
        f"{dotted(path)}: found {shown(value, 80)} ({type(value).__name__}), expected a string, a "
        f"number, a boolean, a list or a table (dict){hint}"
    )


def _text_key(key: object, path: KeyPath) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{dotted(path)}: found the key {shown(key, 80)} ({type(key).__name__}), expected a string")
    return key
