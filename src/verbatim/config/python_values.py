"""Converts settings written in Python to the values that a TOML file gives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from verbatim.config.origins import KeyPath, dotted
from verbatim.texts import shown


class NotPlain(ValueError):
    """A value that TOML does not have."""


def assignments(settings: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Each key that is set, with its path from the top, and its value as TOML has it.

    A dot in a key of the top level leads into a table, as in TOML. Paths become strings, tuples lists, numpy's numbers
    Python's. None stays: it unsets a key.

    >>> list(assignments({"trainer.optim.lr": 1e-4, "orchestrator": {"filters": (), "group_size": 4}}))
    [(('trainer', 'optim', 'lr'), 0.0001), (('orchestrator', 'filters'), []), (('orchestrator', 'group_size'), 4)]

    Raises:
        NotPlain: names the key, and what was found.
    """
    for key, value in settings.items():
        yield from _leaves(value, tuple(str(key).split(".")))


def assign(document: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the key at `path` in place, or remove it where the value is None; missing tables on the way are made."""
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
            raise NotPlain(f"{dotted(path)}: found {shown(value, 80)}, expected text that UTF-8 can write") from None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_text_key(key, path): _plain(inner, (*path, key)) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner, (*path, index)) for index, inner in enumerate(value)]
    hint = '; name a component of your own: {"type": "my_module.my_function"}' if callable(value) else ""
    raise NotPlain(f"{dotted(path)}: found {shown(value, 80)} ({type(value).__name__}), expected a string, a number, "
                   f"a boolean, a list or a table (dict){hint}")  # fmt: skip


def _text_key(key: object, path: KeyPath) -> str:
    if not isinstance(key, str):
        raise NotPlain(f"{dotted(path)}: found the key {shown(key, 80)} ({type(key).__name__}), expected a string")
    return key
