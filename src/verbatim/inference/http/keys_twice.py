"""Finds duplicate keys in the objects of a JSON body. Parsers keep only the last value of such a key, so the earlier
values would be lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from verbatim.core.errors import UsageError

_LONGEST_PLACE, _LONGEST_KEY = 200, 80


def check_keys(data: bytes | bytearray, value: object) -> None:
    r"""Refuse a body in which an object has a key twice.

    Python's parser can find duplicate keys with a hook, but is much slower than orjson. A body with a duplicate key has
    more strings than the parsed value, so two quick checks clear almost every body: the body equals what orjson writes
    for the value, or it has twice as many quotes as the value has strings. Any other body is parsed again, with the
    hook.

    Args:
        data: The JSON text of the body.
        value: The value parsed from it.

    Raises:
        UsageError: an object has a key twice; the message names the object and the key.

    >>> check_keys(b'{"a": {"b": 1, "b": 2}}', {"a": {"b": 2}})
    Traceback (most recent call last):
    ...
    verbatim.core.errors.UsageError: a has the key 'b' twice, and one of the values would be lost; send each key once
    """
    if _has_as_many(data, value):
        return
    found = next(_twice(_marked(data), ""), None)
    if found is not None:
        place, key = found
        raise UsageError(
            f"{place[:_LONGEST_PLACE] or 'the body'} has the key {key[:_LONGEST_KEY]!r} twice, and one of the values "
            "would be lost; send each key once"
        )


def _has_as_many(data: bytes | bytearray, value: object) -> bool:
    """True if a quick check shows that the body has no more strings than the value."""
    # A body without backslashes is mostly token ids, and counting its quotes is faster than encoding the value again.
    return (b"\\" in data and _is_written_so(data, value)) or _num_quotes(data) == 2 * _num_texts(value)


def _is_written_so(data: bytes | bytearray, value: object) -> bool:
    """True if the body equals what orjson writes for the value. The bodies of clients in JavaScript and of most clients
    in Python pass this check."""
    import orjson

    try:
        return orjson.dumps(value) == data
    except TypeError:  # an integer with more than 64 bits, or too many levels
        return False


def _num_quotes(data: bytes | bytearray) -> int:
    r"""Number of quotes that delimit strings in JSON text, not counting escaped quotes.

    >>> _num_quotes(b'{"a\\\\": "\\"b\\""}')
    4
    """
    if b"\\" not in data:
        return data.count(b'"')
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"")  # a quote after an escaped backslash would look escaped
    return data.count(b'"') - data.count(b'\\"')


def _num_texts(value: object) -> int:
    """Lower bound of the number of strings in a JSON value, including keys. Lists that begin with an integer, mostly
    token ids, are skipped for speed. If the bound is too low, the body is only parsed again."""
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
    """An object with a duplicate key."""

    key = ""
    """The duplicate key."""


def _marked(data: bytes | bytearray) -> object:
    """Parse the body again; objects with duplicate keys become `_Marked`.

    Raises:
        UsageError: the body is nested more deeply than Python's parser supports.
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
    """Yield (place, duplicate key) for each marked object in a value, outer objects first. Iterative, because bodies
    may be deeply nested."""
    left: list[tuple[object, str]] = [(value, place)]
    for item, where in left:
        if isinstance(item, _Marked):
            yield where, item.key
        if isinstance(item, dict):
            left += [(inner, f"{where}.{key}" if where else key) for key, inner in item.items()]
        elif isinstance(item, list):
            left += [(inner, f"{where}[{k}]") for k, inner in enumerate(item)]
