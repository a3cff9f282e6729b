"""Finds values that a configuration cannot hold, although they are valid TOML or came from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verbatim.config.key_locations import KeyPath
from verbatim.core.user_values import is_short

DEEPEST = 100
"""Maximum nesting depth of tables and lists."""
TOO_DEEP = f"it is nested deeper than {DEEPEST} levels; expected fewer"
TOO_LONG = "a number of more than 4,300 digits; expected a shorter one, or a string"
_SHOWN = 4
"""If a value is too deep, a message shows this many of the leading keys of its path."""


def problems_of_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """The values that a configuration cannot hold, with their paths: values nested too deeply, huge numbers, strings
    that are not UTF-8.

    >>> list(problems_of_values({"a": [1, 16**5000]}))
    [(('a', 1), 'a number of more than 4,300 digits; expected a shorter one, or a string')]
    """
    if isinstance(value, dict | list):
        if len(path) > DEEPEST:
            yield path[:_SHOWN], TOO_DEEP
            return
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and not _is_text(key):
                yield path, f"the key {key!r:.80} contains half a character or an invalid byte; expected UTF-8"
            yield from problems_of_values(inner, (*path, key))
    elif isinstance(value, int) and not is_short(value):
        yield path, TOO_LONG
    elif isinstance(value, str) and not _is_text(value):
        yield path, f"{value!r:.80} contains half a character or an invalid byte; expected UTF-8"


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
