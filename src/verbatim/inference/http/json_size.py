"""Says how large the JSON of a body is before it is parsed: a megabyte of brackets becomes tens of megabytes of
objects, and parsers hold all other threads up until they are done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import UsageError

MOST_VALUES = 2**18
"""Most values of a body, unless its reader says another number: 20,000 messages have about half as many."""
MOST_DEPTH = 900
"""Most levels of a body, which every parser can read; fields of it have a limit of their own, far below."""
LARGE = 2**16
"""Bytes of a body that is parsed on a thread."""
WINDOW = 2**18
"""Bytes that are looked at in one piece; in between, other threads run."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_IS_STEP = np.zeros(256, dtype=bool)
_IS_STEP[list(b"[{,")] = True
_DEPTH = np.zeros(256, dtype=np.int8)
_DEPTH[list(b"[{")] = 1
_DEPTH[list(b"]}")] = -1


def check_json_size(data: bytes | bytearray, *, most_values: int = MOST_VALUES) -> None:
    """Refuse JSON of too many values or levels. Whether it is JSON at all is for a parser to say.

    Args:
        data: The body.
        most_values: Most items of lists and objects, and lists and objects themselves.

    Raises:
        UsageError: says how many there are, and how many may be.
    """
    if len(data) <= most_values and data.count(b"[") + data.count(b"{") <= MOST_DEPTH:
        return
    values, depth = json_size(data, most_values)
    if values > most_values:
        raise UsageError(f"the body holds more than {most_values} values; at most that many are taken")
    if depth > MOST_DEPTH:
        raise UsageError(f"the body is nested too deeply: {depth} levels, at most {MOST_DEPTH} are taken")


def json_size(data: bytes | bytearray, most_values: int | None = None) -> tuple[int, int]:
    r"""Values and levels of JSON. It stops to count above `most_values`.

    >>> json_size(b'{"a": [1, "[[,\\"[", {}]}')
    (5, 3)
    """
    values = depth = deepest = num_backslashes = 0
    in_text = False
    for start in range(0, len(data), WINDOW):
        window = np.frombuffer(data, dtype=np.uint8, count=min(WINDOW, len(data) - start), offset=start)
        ends, num_backslashes = _ends_of_texts(window, num_backslashes)
        outside = (np.cumsum(ends, dtype=np.int32) + in_text) % 2 == 0
        in_text = not outside[-1]
        values += int((outside & _IS_STEP[window]).sum())
        levels = np.cumsum(np.where(outside, _DEPTH[window], 0), dtype=np.int32) + depth
        depth, deepest = int(levels[-1]), max(deepest, int(levels.max()))
        if most_values is not None and values > most_values:
            break
    return values, deepest


def _ends_of_texts(window: NDArray[np.uint8], num_before: int) -> tuple[NDArray[np.bool_], int]:
    """Where texts begin and end, and the backslashes in a row at the window's end, given those before it."""
    places = np.arange(len(window), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(window != _BACKSLASH, places, np.int32(-1 - num_before)))
    before = np.empty_like(places)
    before[0] = num_before
    before[1:] = places[:-1] - last_other[:-1]
    return (window == _QUOTE) & (before % 2 == 0), int(len(window) - 1 - last_other[-1])
