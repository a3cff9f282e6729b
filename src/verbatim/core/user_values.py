"""Checks values from users (messages, tool schemas, info, rows) where they enter. Otherwise a value that contains
itself, or is too deep or too large, would end the run at the first place that traverses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

import numpy as np

from verbatim.core.texts import error_text

DEEPEST = 100
"""Maximum nesting depth of lists and mappings; Python itself traverses about 1,000 levels."""
MOST_VALUES = 1_000_000
"""Maximum number of values; a value that occurs twice counts twice, because it would be written twice."""
MOST_CHARACTERS = 64 * 2**20
"""Maximum number of characters of all strings together."""
EXPECTED = "texts, numbers, booleans, None, lists and mappings"
ATOMS = frozenset({str, int, float, bool, NoneType})
"""Python's own types for the JSON values that contain no other values."""
_MOST_BITS = 14_000
"""2^14000 has 4,215 digits, below Python's limit of 4,300; larger integers are tested by converting them."""


def why_refused(value: Any, *, of_json: bool = True, of_info: bool = False) -> str | None:
    """Why a user's value is refused, or None if it is not refused.

    Args:
        value: Any value. Each part is checked once, however often it occurs.
        of_json: True if the value may contain only JSON types and numpy numbers; otherwise values of other types are
            skipped.
        of_info: True if numpy arrays and keys of any type are allowed too, because `info` is only written, not read.

    >>> loop = {"role": "user"}
    >>> loop["self"] = loop
    >>> why_refused(loop)
    "it contains itself, at ['self']"
    >>> why_refused({"when": {1, 2}})
    "['when'] is a set; expected texts, numbers, booleans, None, lists and mappings"
    """
    if _is_texts(value):
        return None
    try:
        _Look(of_json, of_info).size(value, ())
    except _ValueRefused as refused:
        return str(refused)
    except Exception as error:  # noqa: BLE001  a user's own mapping may raise anything
        return f"it cannot be read: {error_text(error, 200)}"
    return None


def _is_texts(value: Any) -> bool:
    """True for a mapping of a few strings, which most messages are: a fast path without a traversal."""
    return (
        type(value) is dict
        and len(value) < MOST_VALUES
        and all(type(key) is type(item) is str for key, item in value.items())
        and sum(map(len, (*value, *value.values()))) <= MOST_CHARACTERS
    )


def is_short(number: int) -> bool:
    """True if Python can convert the number to decimal; Python refuses more than 4,300 digits."""
    if int.bit_length(number) <= _MOST_BITS:
        return True
    try:
        int.__repr__(number)
    except ValueError:
        return False
    return True


def as_atom(value: Any) -> Any:
    """Convert a JSON value without inner values to exactly Python's own type, because a subclass may override any
    method.

    Other values are returned unchanged.

    >>> as_atom(np.int64(5)), as_atom(np.str_("x")), as_atom([1])
    (5, 'x', [1])
    """
    if type(value) in ATOMS:
        return value
    if isinstance(value, np.generic):
        return value.item()
    for kind, exact in _EXACT:
        if isinstance(value, kind):
            return exact(value)
    return value


_EXACT: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, lambda text: str.__getitem__(text, slice(None))),
    (int, lambda number: int.__add__(number, 0)),
    (float, float.__pos__),
)
"""For each type, a function that converts an instance of a subclass without calling the subclass's own methods."""


class _ValueRefused(Exception):
    """The value cannot be kept; the message has the reason."""


class _Look:
    """One traversal of a value. A path is a tuple of the keys and indices that lead to a value."""

    def __init__(self, of_json: bool, of_info: bool) -> None:
        self._of_json, self._of_info = of_json, of_info
        self._open: set[int] = set()
        """Ids of the containers that hold the current value, to detect cycles."""
        self._known: dict[int, tuple[Any, int, int, int]] = {}
        """Containers already checked, by id, with their number of values, characters and levels. The container itself
        is kept, too, so that no other object can get its id."""

    def size(self, value: Any, path: tuple[Any, ...]) -> tuple[int, int, int]:
        """A value's number of values, characters and levels."""
        if type(value) is str:
            return 1, len(value), 0
        if isinstance(value, Mapping):
            return self._container(value, path, value.items, is_table=True)
        if isinstance(value, list | tuple):
            return self._container(value, path, lambda: enumerate(value), is_table=False)
        if isinstance(value, np.ndarray) and value.dtype != object and (self._of_info or not self._of_json):
            self._check(value.size, 0, value.ndim, path)
            return max(1, value.size), 0, value.ndim
        if self._of_json:
            self._check_atom(value, lambda: _place(path).removeprefix("at ") if path else "it")
        return 1, str.__len__(value) if isinstance(value, str) else 0, 0

    def _check_atom(self, value: Any, where: Callable[[], str]) -> None:
        atom = as_atom(value)
        if type(atom) not in ATOMS:
            hint = "; .tolist() makes an array a list" if isinstance(value, np.ndarray) else ""
            raise _ValueRefused(f"{where()} is a {type(value).__name__}; expected {EXPECTED}{hint}")
        if type(atom) is int and not is_short(atom):
            raise _ValueRefused(f"{where()} is a number of more than 4,300 digits; expected a shorter one, or a text")

    def _container(self, value: Any, path: tuple[Any, ...], items: Any, *, is_table: bool) -> tuple[int, int, int]:
        own = id(value)
        if own in self._open:
            raise _ValueRefused(f"it contains itself, {_place(path)}")
        if len(path) > DEEPEST:
            raise _ValueRefused(f"it has more than {DEEPEST} levels, {_place(path)}")
        if own not in self._known:
            self._open.add(own)
            found = self._content(items(), path, is_table)
            self._open.discard(own)
            self._known[own] = (value, *found)
        _, values, characters, levels = self._known[own]
        self._check(values, characters, len(path) + levels, path)
        return values, characters, levels

    def _content(self, items: Iterable[tuple[Any, Any]], path: tuple[Any, ...], is_table: bool) -> tuple[int, int, int]:
        values, characters, levels = 1, 0, 0
        others: list[Any] = []
        texts: set[str] = set()
        for key, item in items:
            if type(key) is str:
                texts.add(key)
            elif is_table:
                if self._of_json and not self._of_info:
                    self._check_atom(key, lambda: f"a key {_place(path)}")
                others.append(key)
            more, longer, deeper = self.size(item, (*path, key))
            values, characters, levels = values + more, characters + longer, max(levels, deeper)
            characters += str.__len__(key) if isinstance(key, str) else 0
            self._check(values, characters, 0, path)
        for written in filter(None, map(self._written, others)):
            if written in texts:
                raise _ValueRefused(
                    f"two keys {_place(path)} have the same text {written!r:.40}; expected keys that differ as texts"
                )
            texts.add(written)
        return values, characters, levels + 1

    def _written(self, key: Any) -> str | None:
        """The text that a key becomes in JSON, or None for a key that is skipped."""
        own = as_atom(key)
        return str(own) if type(own) in ATOMS or self._of_info else None

    def _check(self, values: int, characters: int, levels: int, path: tuple[Any, ...]) -> None:
        if values > MOST_VALUES:
            raise _ValueRefused(f"it has more than {MOST_VALUES:,} values, {_place(path)}")
        if characters > MOST_CHARACTERS:
            raise _ValueRefused(f"its texts have more than {MOST_CHARACTERS:,} characters, {_place(path)}")
        if levels > DEEPEST:
            raise _ValueRefused(f"it has more than {DEEPEST} levels, {_place(path)}")


def _place(path: tuple[Any, ...]) -> str:
    """The position of a value, for messages.

    >>> _place(("tools", 3))
    "at ['tools'][3]"
    """
    shown = "".join(f"[{key!r:.40}]" for key in path[:4])
    return f"at {shown}{'...' if len(path) > 4 else ''}" if path else "at its top level"
