"""Counts the values and levels of a JSON body before it is parsed.

This is necessary because a megabyte of brackets becomes tens of megabytes of objects, and a parser holds the GIL until
it is done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import UsageError

MOST_VALUES = 2**18
"""Default maximum number of values in a body. A body with 20,000 messages has about half of this number."""
MOST_DEPTH = 900
"""Maximum nesting depth of a body. It is below Python's recursion limit, so that every parser can read the body. A
separate, much lower limit applies to fields."""
LARGE = 2**16
"""Bodies with more bytes than this are parsed on a thread."""
WINDOW = 2**18
"""Number of bytes that are scanned at a time. Other threads can run between two scans."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
# By byte value: True if such a byte outside of strings counts as one value.
_IS_STEP = np.zeros(256, dtype=bool)
_IS_STEP[list(b"[{,")] = True
# By byte value: how such a byte outside of strings changes the nesting depth.
_DEPTH = np.zeros(256, dtype=np.int8)
_DEPTH[list(b"[{")] = 1
_DEPTH[list(b"]}")] = -1


def check_json_size(data: bytes | bytearray, *, most_values: int = MOST_VALUES) -> None:
    """Refuse JSON with too many values or levels. Whether the body is valid JSON is checked only by the parser, later.

    Args:
        data: The body.
        most_values: Maximum number of values, counting lists, objects and their items.

    Raises:
        UsageError: there are too many values or levels; the message has the limit.
    """
    # A body with few bytes and few brackets cannot exceed the limits, so most requests are not scanned.
    if len(data) <= most_values and data.count(b"[") + data.count(b"{") <= MOST_DEPTH:
        return
    values, depth = json_size(data, most_values)
    if values > most_values:
        raise UsageError(f"the body has more than {most_values} values, which is the limit")
    if depth > MOST_DEPTH:
        raise UsageError(f"the body is nested too deeply: {depth} levels, at most {MOST_DEPTH} are accepted")


def json_size(data: bytes | bytearray, most_values: int | None = None) -> tuple[int, int]:
    r"""Count the values and levels in JSON. Counting stops once there are more than `most_values`.

    >>> json_size(b'{"a": [1, "[[,\\"[", {}]}')
    (5, 3)
    """
    values = depth = deepest = num_backslashes = 0
    in_text = False
    for start in range(0, len(data), WINDOW):
        window = np.frombuffer(data, dtype=np.uint8, count=min(WINDOW, len(data) - start), offset=start)
        ends, num_backslashes = _ends_of_texts(window, num_backslashes)
        # A byte is outside of strings after an even number of quotes. `in_text` carries the state across windows.
        outside = (np.cumsum(ends, dtype=np.int32) + in_text) % 2 == 0
        in_text = not outside[-1]
        values += int((outside & _IS_STEP[window]).sum())
        levels = np.cumsum(np.where(outside, _DEPTH[window], 0), dtype=np.int32) + depth
        depth, deepest = int(levels[-1]), max(deepest, int(levels.max()))
        if most_values is not None and values > most_values:
            break
    return values, deepest


def _ends_of_texts(window: NDArray[np.uint8], num_before: int) -> tuple[NDArray[np.bool_], int]:
    """Return (a mask of the quotes that begin or end a string, `num_before` for the next window). Such a quote follows
    an even number of backslashes. `num_before` is the number of consecutive backslashes right before the window."""
    places = np.arange(len(window), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(window != _BACKSLASH, places, np.int32(-1 - num_before)))
    before = np.empty_like(places)
    before[0] = num_before
    before[1:] = places[:-1] - last_other[:-1]
    return (window == _QUOTE) & (before % 2 == 0), int(len(window) - 1 - last_other[-1])
