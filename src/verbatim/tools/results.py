"""Converts a tool's return value to the text that the model reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Set
from enum import Enum
from os import PathLike, fspath
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from verbatim.tools.base import ToolResult


def as_result(value: object) -> ToolResult:
    """A `ToolResult` or string unchanged, None as "", any other value as JSON.

    Dataclasses, pydantic models and mappings are objects; an enumeration's member is its value; a set is a sorted list,
    so that it reads the same in every process; dates, paths and numpy values are converted by pydantic and numpy.

    >>> as_result({"towns": {"Ulm", "Bonn"}}).content
    '{"towns": ["Bonn", "Ulm"]}'

    Raises:
        TypeError: a value without a JSON form.
    """
    if isinstance(value, ToolResult):
        return value
    value = value.value if isinstance(value, Enum) else value
    if value is None:
        return ToolResult(content="")
    return ToolResult(content=value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Set):
        return _sorted([_plain(item) for item in value])
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, PathLike):
        return _plain(fspath(value))
    try:
        return to_jsonable_python(value)
    except ValueError as error:
        raise TypeError(f"a {type(value).__name__} has no JSON form; return a string, a dict or a dataclass") from error


def _sorted(items: list[Any]) -> list[Any]:
    """Sorted by value, or by JSON text if the values do not compare."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=_order)


def _order(plain: Any) -> str:
    return json.dumps(plain, ensure_ascii=False, sort_keys=True)


def _key(key: Any) -> Any:
    plain = _plain(key)
    return plain if plain is None or isinstance(plain, str | int | float) else json.dumps(plain, ensure_ascii=False)
