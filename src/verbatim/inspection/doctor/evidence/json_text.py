"""Parses and compares JSON values embedded in text."""

from __future__ import annotations

import json
from typing import Any


def json_at(text: str, start: int) -> tuple[Any, int] | None:
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


_JSON = json.JSONDecoder()


def same_json(a: Any, b: Any) -> bool:
    """True if two values are equal. A string that contains a JSON object or list is compared as that object or list."""
    a, b = _unquoted(a), _unquoted(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _unquoted(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        found = json_at(value.strip(), 0)
        return found[0] if found is not None and found[1] == len(value.strip()) else value
    return value
