"""Copies messages and schemas, and compares them with copies that were made before: exactly, and fast where they are
plain JSON, because both happen in every turn."""

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
"""The types of values that are plain JSON whatever they are; a number may be too long to be written."""
_MOST_COST, _CONTAINER = MOST_VALUES, 5000
"""Characters and values together of one message that is copied without a look at it before, all limits being above;
and for how many of them a list or a dict counts."""

_HEADER = len(marshal.dumps([], 0))
_SHORT = 256
"""Bytes up to which writing something down is faster than comparing it piece by piece."""


class _NotPlain(Exception):
    """The value is not plain JSON, or too much of it."""


def copied(value: Any, what: str = "a message", *, of_info: bool = False) -> Any:
    """A deep copy of a message, in Python's own types of JSON: whatever reads it later asks no class of a user's.

    Args:
        value: A user's own; its subclasses of texts, numbers, lists and mappings become these.
        what: Names it in the error.
        of_info: It is an `info`, which may hold numpy's arrays too, and keys of any type.

    Raises:
        EnvironmentFault: the message holds itself, is too deep or too large, holds what JSON cannot, or cannot be
            copied.
    """
    try:
        return _plain_copy(value, [_MOST_COST], DEEPEST)
    except _NotPlain:
        pass
    if (why := why_refused(value, of_info=of_info)) is not None:
        raise EnvironmentFault(f"{what}: {why}")
    try:
        return _rebuilt(value, {})
    except Exception as error:  # what an environment puts into its messages raises what it likes
        raise EnvironmentFault(f"{what} cannot be copied: {error_text(error)}") from error


def _rebuilt(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """The value in Python's own types; what stands at several places is built once.

    Args:
        value: Nothing is wrong with it.
        known: Containers and what was built of them, by their identity.
    """
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, Mapping):
        made: Any = {_own_key(key): _rebuilt(item, known) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        made = [_rebuilt(item, known) for item in value]
    elif isinstance(value, np.ma.MaskedArray):
        made = value.tolist()  # None where it is masked; another array would have the values below
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
    """Whether a value is plain JSON of few lists and dicts: then nothing is wrong with it."""
    try:
        _plain_copy(value, [_MOST_COST], DEEPEST)
    except _NotPlain:
        return False
    return True


def refuse(value: Any, what: str) -> None:
    """An EnvironmentFault that names `what`, where a user's value cannot be kept; see `user_values`."""
    if (why := why_refused(value)) is not None:
        raise EnvironmentFault(f"{what}: {why}")


def _plain_copy(value: Any, left: list[int], levels: int) -> Any:
    """The copy of plain JSON; a `_NotPlain` where it costs more than is `left`, counted as a list or a dict is done."""
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
"""The places of the messages that hold more than text, each with the rest as bytes; None where that says too little."""


def others_in(messages: Sequence[Message], start: int = 0) -> Others:
    """What `begins_with` needs to know of copied messages, the first of which stands at this place."""
    return tuple([(start + i, _short_rest(message)) for i, message in enumerate(messages) if not _is_text(message)])


def begins_with(messages: Sequence[Message], known: tuple[Message, ...], others: Others | None) -> bool:
    """Whether messages begin with those that are known, so that a template would write them alike.

    Args:
        messages: As their owner has them now.
        known: Copies, made by `copied`.
        others: Of the known messages; None: these are compared piece by piece.

    Raises:
        EnvironmentFault: the messages cannot be compared.
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
    try:
        return same_messages(start, known)
    except Exception as error:  # a user's own mapping raises what it likes
        raise EnvironmentFault(f"the messages cannot be compared: {error_text(error)}") from error


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
        mine, its = _by_key(messages), _by_key(others)
        return mine.keys() == its.keys() and all(same_messages(mine[key], its[key]) for key in mine)
    if isinstance(messages, list | tuple) and isinstance(others, list | tuple):
        return len(messages) == len(others) and all(map(same_messages, messages, others))
    own, other = as_atom(messages), as_atom(others)
    return type(own) is type(other) and type(own) in ATOMS and bool(own == other)


def _by_key(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {as_atom(key): item for key, item in mapping.items()}


def schema_and_text(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A tool's schema in Python's own types, and `str` of it; the same text for all episodes with the same tool.

    Raises:
        EnvironmentFault: the schema holds itself, is too deep or too large, or holds what JSON cannot.
    """
    try:
        text = _text_of_plain(marshal.dumps(schema))  # type: ignore[arg-type]
    except ValueError:  # it holds what is of no type of Python's own
        text = None
    if text is None:
        schema = copied(schema, "a tool's schema")
        text = str(schema)
    return schema, text


@lru_cache(maxsize=1024)
def _text_of_plain(written: bytes) -> str | None:
    """`str` of what was written down; None if it is not plain JSON: what is read has the types of what was written."""
    value = marshal.loads(written)
    return str(value) if is_plain(value) else None
