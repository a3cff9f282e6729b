"""Finds a key that stands twice in one object of a JSON body. Parsers keep the last value, and the others are lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from verbatim.core.errors import UsageError

_LONGEST_PLACE, _LONGEST_KEY = 200, 80


def check_keys(data: bytes | bytearray, value: object) -> None:
    r"""Refuse a body in which an object has a key twice.

    A body has one text more than what was parsed of it for each key that was lost. Nearly every body is what a quick
    writer makes of the value, or has as many quotes as the value has texts. Any other is parsed once more.

    Args:
        data: The JSON text of a body, which was parsed already.
        value: What was parsed.

    Raises:
        UsageError: names the object and the key.

    >>> check_keys(b'{"a": {"b": 1, "b": 2}}', {"a": {"b": 2}})
    Traceback (most recent call last):
    ...
    verbatim.core.errors.UsageError: a has the key 'b' twice, of which one value would be lost; send each key once
    """
    if _has_as_many(data, value):
        return
    found = next(_twice(_marked(data), ""), None)
    if found is not None:
        place, key = found
        raise UsageError(
            f"{place[:_LONGEST_PLACE] or 'the body'} has the key {key[:_LONGEST_KEY]!r} twice, of which one value "
            "would be lost; send each key once"
        )


def _has_as_many(data: bytes | bytearray, value: object) -> bool:
    """Whether it can be told that the body has as many texts as the value."""
    # What holds no backslash is mostly ids of tokens, which are quicker counted than written.
    return (b"\\" in data and _is_written_so(data, value)) or _num_quotes(data) == 2 * _num_texts(value)


def _is_written_so(data: bytes | bytearray, value: object) -> bool:
    """Whether the body is what orjson writes, and JavaScript's and most of Python's clients."""
    import orjson

    try:
        return orjson.dumps(value) == data
    except TypeError:  # of a large integer, or of many levels
        return False


def _num_quotes(data: bytes | bytearray) -> int:
    r"""The quotes around the texts of JSON in UTF-8.

    >>> _num_quotes(b'{"a\\\\": "\\"b\\""}')
    4
    """
    if b"\\" not in data:
        return data.count(b'"')
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"")  # else a quote behind it looks escaped
    return data.count(b'"') - data.count(b'\\"')


def _num_texts(value: object) -> int:
    """The texts in a JSON value, keys included; at most, for lists that begin with a number are passed by."""
    num, left = 0, [value]
    for holder in left:
        items: Iterable[object] = ()
        if type(holder) is dict:
            num += len(holder)
            items = holder.values()
        elif type(holder) is list and holder and type(holder[0]) is not int:
            items = holder
        for item in items:
            if type(item) is str:
                num += 1
            elif type(item) is dict or type(item) is list:
                left.append(item)
    return num


class _Marked(dict[str, object]):
    """An object with a key twice."""

    key = ""


def _marked(data: bytes | bytearray) -> object:
    """The JSON value with such objects marked.

    Raises:
        UsageError: it is nested more deeply than Python's parser goes.
    """
    try:
        return json.loads(data, object_pairs_hook=_object)
    except RecursionError:
        raise UsageError("the body is nested too deeply") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    marked = _Marked(found)
    marked.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return marked


def _twice(value: object, place: str) -> Iterator[tuple[str, str]]:
    """(place, key) of each marked object in a value, outer ones first."""
    left: list[tuple[object, str]] = [(value, place)]
    for item, where in left:
        if isinstance(item, _Marked):
            yield where, item.key
        if isinstance(item, dict):
            left += [(inner, f"{where}.{key}" if where else key) for key, inner in item.items()]
        elif isinstance(item, list):
            left += [(inner, f"{where}[{k}]") for k, inner in enumerate(item)]
