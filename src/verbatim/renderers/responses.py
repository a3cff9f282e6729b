"""Records sampled tool calls: every attempt is kept, and only well-formed ones count as calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from verbatim.types import ParseStatus, ToolCall

MAX_DEPTH = 64
"""The deepest nesting of arguments; deeper values would overflow the stack of later readers."""
_MAX_BITS = 14_000
"""The largest integer, in bits; Python refuses to write longer ones (`sys.get_int_max_str_digits`)."""


def check_call(name: object, arguments: object, status: ParseStatus, raw: str) -> ToolCall:
    """Record a call; it is "ok" only with a text as name and a plain JSON object as arguments.

    JSON that Python reads but others do not (NaN, half a surrogate pair, bottomless nesting) is not JSON here: it
    would break whatever writes it down later.
    """
    if status == "ok" and not (isinstance(name, str) and name and isinstance(arguments, dict)):
        status = "malformed_structure"
    if status == "ok" and not (is_json(arguments) and is_json(name)):
        status = "invalid_json"
    return ToolCall(
        name=name if isinstance(name, str) and is_json(name) else None,
        arguments=arguments if status == "ok" and isinstance(arguments, dict) else None,
        status=status,
        raw=raw,
    )


def unreadable(raw: str, status: ParseStatus) -> ToolCall:
    """Record an attempt that could not be read at all."""
    return ToolCall(name=None, arguments=None, status=status, raw=raw)


def is_json(value: object) -> bool:
    """Whether a value can be written as JSON text in UTF-8 and be nested less than `MAX_DEPTH` deep."""
    return is_shallow(value) and all(_is_json_item(item) for level in levels(value) for item in level)


def is_shallow(value: object) -> bool:
    """Whether a value is nested less than `MAX_DEPTH` deep; one that holds itself is not."""
    return all(depth < MAX_DEPTH for depth, _ in enumerate(levels(value)))


def levels(value: object) -> Iterator[list[object]]:
    """The value, then all that is in it, then all that is in that, and so on; each object once a level."""
    level = [value]
    while level:
        yield level
        inner = [
            item for outer in level if isinstance(outer, (Mapping, list, tuple))
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]  # fmt: skip
        level = list({id(item): item for item in inner}.values())


def _is_json_item(item: object) -> bool:
    """Whether a value is JSON, whatever is in it."""
    if isinstance(item, str):
        return not any("\ud800" <= c <= "\udfff" for c in item)
    if isinstance(item, dict):
        return all(isinstance(key, str) and _is_json_item(key) for key in item)
    if isinstance(item, int):
        return item.bit_length() <= _MAX_BITS
    return item is None or isinstance(item, list) or (isinstance(item, float) and math.isfinite(item))
