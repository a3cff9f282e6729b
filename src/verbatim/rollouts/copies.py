"""Copies messages and schemas, and compares them with earlier copies. Messages are copied and compared in every turn,
so there is a fast path for plain JSON. The slow path gives exactly the same results."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from verbatim.core.errors import EnvironmentFault
from verbatim.core.texts import error_text
from verbatim.core.types import Message
from verbatim.core.user_values import ATOMS, DEEPEST, MOST_VALUES, as_atom, is_short, why_refused

_TEXT, _DICT = frozenset({str}), frozenset({dict})
_AS_THEY_ARE = ATOMS - {int}
"""Types whose values are always plain JSON. `int` is not among them, because an int may have too many digits to be
written as text."""
_MOST_COST, _CONTAINER = MOST_VALUES, 5000
"""`_MOST_COST` is the maximum cost of a message on the fast path, which skips the full check. Each character and each
value costs 1, and each list or dict costs `_CONTAINER`. All limits of the full check are higher than `_MOST_COST`."""

_HEADER = len(marshal.dumps([], 0))
"""Size in bytes of the header of a serialised list, which holds the list's length. The header is cut off, so that the
bytes of several messages can be joined."""
_SHORT = 256
"""Up to this size in bytes, comparing serialised values is faster than comparing the values one by one."""


class _NotPlain(Exception):
    """Raised for a value that is not plain JSON or is too large."""


def copied(value: Any, what: str = "a message", *, of_info: bool = False) -> Any:
    """Deep-copy a message into built-in JSON types, so that code that reads the copy later never calls a user's class.

    Args:
        value: The user's value. Subclasses of str, numbers, lists and mappings become the built-in types.
        what: Name of the value in the error.
        of_info: True if the value is an `info`, which may also contain numpy arrays, and keys of any type.

    Raises:
        EnvironmentFault: the value contains itself, is too deep or too large, has values that JSON cannot represent,
            or cannot be copied.
    """
    try:
        return _plain_copy(value, [_MOST_COST], DEEPEST)
    except _NotPlain:
        pass
    if (why := why_refused(value, of_info=of_info)) is not None:
        raise EnvironmentFault(f"{what}: {why}")
    try:
        return _rebuilt(value, {})
    except Exception as error:  # objects from an environment may raise anything
        raise EnvironmentFault(f"{what} cannot be copied: {error_text(error)}") from error


def _rebuilt(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """Rebuild a value in built-in types. An object that occurs several times is built once.

    Args:
        value: A value that has passed the check.
        known: Containers and their copies, keyed by the container's id. The container itself is kept too, so that its
            id is not reused.
    """
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, Mapping):
        made: Any = {_own_key(key): _rebuilt(item, known) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        made = [_rebuilt(item, known) for item in value]
    elif isinstance(value, np.ma.MaskedArray):
        made = value.tolist()  # masked entries become None; `np.array` would reveal the values under the mask
    elif isinstance(value, np.ndarray):
        made = np.array(value)
    else:
        return as_atom(value)
    known[id(value)] = (value, made)
    return made


def _own_key(key: Any) -> Any:
    own = as_atom(key)
    return own if type(own) in ATOMS else str(key)


def is_plain(value: Any) -> bool:
    """Return True if a value is plain JSON and small enough for the fast path. Such a value needs no further check."""
    try:
        _plain_copy(value, [_MOST_COST], DEEPEST)
    except _NotPlain:
        return False
    return True


def refuse(value: Any, what: str) -> None:
    """Raise an EnvironmentFault that names `what` if a user's value cannot be kept in a trajectory (see
    `user_values`)."""
    if (why := why_refused(value)) is not None:
        raise EnvironmentFault(f"{what}: {why}")


def _plain_copy(value: Any, left: list[int], levels: int) -> Any:
    """Copy plain JSON. Subtracts the cost of each copied list or dict from `left[0]`. Raises `_NotPlain` if the value
    is not plain JSON, or if its cost exceeds `left[0]`."""
    kind, cost = type(value), _CONTAINER
    copied = value
    if kind is dict:
        if not levels or not _TEXT.issuperset(map(type, value)):
            raise _NotPlain
        copied = value.copy()
        cost += sum(map(len, value)) + len(value)
        if _TEXT.issuperset(map(type, value.values())):  # as in most messages
            cost += sum(map(len, value.values()))
        else:
            for key, item in value.items():
                if type(item) is str:
                    cost += len(item)
                elif type(item) not in _AS_THEY_ARE:
                    copied[key] = _plain_copy(item, left, levels - 1)
    elif kind is list:
        if not levels:
            raise _NotPlain
        cost, copied = cost + len(value), value.copy()
        for place, item in enumerate(value):
            if type(item) is str:
                cost += len(item)
            elif type(item) not in _AS_THEY_ARE:
                copied[place] = _plain_copy(item, left, levels - 1)
    elif kind is str:
        cost = len(value)
    elif kind in _AS_THEY_ARE or (kind is int and is_short(value)):
        return value
    else:
        raise _NotPlain
    left[0] -= cost
    if left[0] < 0:
        raise _NotPlain
    return copied


Others: TypeAlias = tuple[tuple[int, bytes | None], ...]
"""For each message with non-string values: (index of the message, these values serialised). If the values are long or
not plain JSON, the pair has None instead of the bytes, and the values must be compared one by one."""


def others_in(messages: Sequence[Message], start: int = 0) -> Others:
    """Compute `Others` for copied messages. The first of these messages has the index `start`."""
    return tuple([(start + i, _short_rest(message)) for i, message in enumerate(messages) if not _is_text(message)])


def begins_with(messages: Sequence[Message], known: tuple[Message, ...], others: Others | None) -> bool:
    """Return True if the messages begin with the known messages. The comparison is so strict that a template renders
    equal messages identically.

    Args:
        messages: The caller's messages as they are now.
        known: Copies of earlier messages, made by `copied`.
        others: `Others` of the known messages, or None to compare value by value.

    Raises:
        EnvironmentFault: the messages cannot be compared.
    """
    start = tuple(messages[: len(known)])
    try:
        if others is not None and start == known and _DICT.issuperset(map(type, start)):
            # For strings `==` is enough. Other values may be equal and yet render differently: 1 == 1.0 == True.
            rests = [rest for _, rest in others if rest is not None]
            if len(rests) == len(others) and b"".join(rests) == _rest([start[place] for place, _ in others]):
                return True
            return all(same_messages(start[place], known[place]) for place, _ in others)
    except Exception:  # noqa: BLE001  a user's `__eq__` may raise; then compare value by value
        pass
    try:
        return same_messages(start, known)
    except Exception as error:  # a user's own mapping may raise anything
        raise EnvironmentFault(f"the messages cannot be compared: {error_text(error)}") from error


def _is_text(message: Any) -> bool:
    """Return True if a message is a dict with string values only, so that every equal message renders identically."""
    return type(message) is dict and _TEXT.issuperset(map(type, message.values()))


def _rest(messages: Sequence[Message]) -> bytes:
    """Serialise the non-string values of messages. Equal bytes mean that the values and their types are equal.

    Raises:
        ValueError: a value is not of a built-in type.
    """
    values = [item for message in messages for item in message.values() if type(item) is not str]
    return marshal.dumps(values, 0)[_HEADER:]


def _short_rest(message: Message) -> bytes | None:
    """Return `_rest` of one message, or None if the message's non-string values are long or not plain JSON."""
    try:
        written = _rest([message])
    except (ValueError, AttributeError):
        return None
    return written if len(written) <= _SHORT else None


def same_messages(messages: Any, others: Any) -> bool:
    """Return True if a template renders both values identically. This is stricter than `==`, since 1, 1.0 and True are
    equal but render differently."""
    if type(messages) is str and type(others) is str:
        return messages == others
    if isinstance(messages, Mapping) and isinstance(others, Mapping):
        mine, its = _by_key(messages), _by_key(others)
        return mine.keys() == its.keys() and all(same_messages(mine[key], its[key]) for key in mine)
    if isinstance(messages, list | tuple) and isinstance(others, list | tuple):
        return len(messages) == len(others) and all(map(same_messages, messages, others))
    own, other = as_atom(messages), as_atom(others)
    return type(own) is type(other) and type(own) in ATOMS and bool(own == other)


def _by_key(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {as_atom(key): item for key, item in mapping.items()}


def schema_and_text(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return (schema, text): a tool's schema in built-in types, and its `str`, cached for all episodes with the same
    tool.

    Raises:
        EnvironmentFault: the schema contains itself, is too deep or too large, or has values that JSON cannot
            represent.
    """
    try:
        text = _text_of_plain(marshal.dumps(schema))  # type: ignore[arg-type]
    except ValueError:  # a value is not of a built-in type
        text = None
    if text is None:
        schema = copied(schema, "a tool's schema")
        text = str(schema)
    return schema, text


@lru_cache(maxsize=1024)
def _text_of_plain(written: bytes) -> str | None:
    """Return the `str` of a marshalled value, or None if the value is not plain JSON. Marshal preserves types, so it is
    enough to check the loaded value."""
    value = marshal.loads(written)
    return str(value) if is_plain(value) else None
