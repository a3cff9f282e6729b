"""Copies messages and schemas, and compares them with copies that were made before: exactly, and fast where they are
plain JSON, because both happen in every turn."""

from __future__ import annotations

import copy
import marshal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, TypeAlias

from verbatim.errors import EnvironmentFault
from verbatim.texts import error_text
from verbatim.types import Message

_TEXT, _DICT = frozenset({str}), frozenset({dict})
_ATOMS = frozenset({str, int, float, bool, NoneType})
_MOST_CONTAINERS = 200
"""Lists and dicts of one message that are copied as plain JSON; `copy.deepcopy` takes more, shared ones, and cycles."""

_HEADER = len(marshal.dumps([], 0))
_SHORT = 256
"""Bytes up to which writing something down is faster than comparing it piece by piece."""


class _NotPlain(Exception):
    """The value is not plain JSON, or too much of it."""


def copied(value: Any) -> Any:
    """A deep copy.

    Raises:
        EnvironmentFault: the value cannot be copied.
    """
    try:
        return _plain_copy(value, [_MOST_CONTAINERS])
    except _NotPlain:
        pass
    try:
        return copy.deepcopy(value)
    except Exception as error:  # what an environment puts into its messages raises what it likes
        raise EnvironmentFault(f"the messages cannot be copied: {error_text(error)}") from error


def _plain_copy(value: Any, left: list[int]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    left[0] -= 1
    if left[0] < 0:
        raise _NotPlain
    if kind is dict:
        if not _TEXT.issuperset(map(type, value)):
            raise _NotPlain
        copied = value.copy()
        for key, item in value.items():
            if type(item) not in _ATOMS:
                copied[key] = _plain_copy(item, left)
        return copied
    if kind is list:
        return [item if type(item) in _ATOMS else _plain_copy(item, left) for item in value]
    raise _NotPlain


Others: TypeAlias = tuple[tuple[int, bytes | None], ...]
"""The places of the messages that hold more than text, each with the rest as bytes; None where that says too little."""


def others_in(messages: Sequence[Message], start: int = 0) -> Others:
    """What `begins_with` needs to know of copied messages, the first of which stands at this place."""
    return tuple([(start + i, _short_rest(message)) for i, message in enumerate(messages) if not _is_text(message)])


def begins_with(messages: Sequence[Message], known: tuple[Message, ...], others: Others | None) -> bool:
    """Whether messages begin with those that are known, so that a template would write them alike.

    Args:
        messages: As their owner has them now.
        known: Copies, made by `copied`.
        others: Of the known messages; None = these are compared piece by piece.
    """
    start = tuple(messages[: len(known)])
    try:
        if others is not None and start == known and _DICT.issuperset(map(type, start)):
            # Equal texts are written alike. Numbers need not be: 1 == 1.0 == True.
            rests = [rest for _, rest in others if rest is not None]
            if len(rests) == len(others) and b"".join(rests) == _rest([start[place] for place, _ in others]):
                return True
            return all(same_messages(start[place], known[place]) for place, _ in others)
    except Exception:  # noqa: BLE001  what cannot be compared as a whole is compared piece by piece
        pass
    return same_messages(start, known)


def _is_text(message: Any) -> bool:
    """Whether a message is a dict whose values are all texts, so that whatever equals it is written alike."""
    return type(message) is dict and _TEXT.issuperset(map(type, message.values()))


def _rest(messages: Sequence[Message]) -> bytes:
    """What messages hold beside texts, one after the other; equal bytes are equal values of equal types.

    Raises:
        ValueError: some of it is not of Python's own types.
    """
    values = [item for message in messages for item in message.values() if type(item) is not str]
    return marshal.dumps(values, 0)[_HEADER:]


def _short_rest(message: Message) -> bytes | None:
    """The same for one message; None if it is no plain JSON, or long."""
    try:
        written = _rest([message])
    except (ValueError, AttributeError):
        return None
    return written if len(written) <= _SHORT else None


def same_messages(messages: Any, others: Any) -> bool:
    """Whether a template would write them alike. Python's own 1 == 1.0 == True would be written differently."""
    if type(messages) is str and type(others) is str:
        return messages == others
    if isinstance(messages, Mapping) and isinstance(others, Mapping):
        return messages.keys() == others.keys() and all(same_messages(messages[key], others[key]) for key in messages)
    if isinstance(messages, list | tuple) and isinstance(others, list | tuple):
        return len(messages) == len(others) and all(map(same_messages, messages, others))
    if isinstance(messages, bool | float) or isinstance(others, bool | float):
        return type(messages) is type(others) and messages == others
    return bool(messages == others)


def schema_text(schema: Mapping[str, Any]) -> str:
    """`str(schema)`; the same text for all episodes with the same tool."""
    try:
        return _text_of(marshal.dumps(schema, 0))  # type: ignore[arg-type]  # raises ValueError for what it cannot write
    except ValueError:  # not of Python's own types
        return str(schema)


@lru_cache(maxsize=1024)
def _text_of(written: bytes) -> str:
    return str(marshal.loads(written))
