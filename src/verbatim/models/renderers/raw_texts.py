"""Escapes the texts of calls in Python for a format that writes them as they are, between quotes (LFM2.5):

    [edit(old='it's
    here', count=2)]

is no Python. A text ends where its quote is followed by the next argument, or by the end of the call. In lists and
objects such a format writes Python and JSON, with escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_NAME = r"""[^\s<>"'=()\[\]{},]+"""
_KEY = r"[^\W\d]\w*"
_CALL = re.compile(rf"({_NAME})\(")
_ARGUMENT = re.compile(rf"({_KEY})=")
_BEGINS = re.compile(rf",\s*({_KEY})\s*=")
_OTHER = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|[\[{]|[\]}]|[,)]|[^'"\[\]{},)]+""")
"""A piece of a value that is no text."""


def escaped(source: str, quote: str, known: Callable[[str], frozenset[str]]) -> str | None:
    """The same list of calls in Python with its texts escaped, as the format would have to write it; None where it does
    not write this.

    Args:
        source: The text between the marks.
        quote: Around the texts of arguments.
        known: The parameters of a tool; empty where they are not known.

    >>> print(escaped(r"[look(at='it's \\n', far=['a'])]", "'", lambda name: frozenset()))
    [look(at="it's \\\\n", far=['a'])]
    """
    ends = re.compile(rf"{quote}(?=, {_KEY}=|\)(?:, {_NAME}\(|\]\Z))")
    written, place = "[", 1
    while source.startswith("[") and (call := _CALL.match(source, place)) is not None:
        written, place = written + call[0], call.end()
        is_first = True
        while not source.startswith(")", place):
            if not is_first:
                if not source.startswith(", ", place):
                    return None
                written, place = f"{written}, ", place + 2
            argument = _ARGUMENT.match(source, place)
            found = _value(source, argument.end(), quote, ends, known(call[1])) if argument is not None else None
            if argument is None or found is None:
                return None
            written, place, is_first = written + argument[0] + found[0], found[1], False
        if source[place:] == ")]":
            return f"{written})]"
        if not source.startswith("), ", place):
            return None
        written, place = f"{written}), ", place + 3
    return None


def _value(source: str, start: int, quote: str, ends: re.Pattern[str], known: frozenset[str]) -> tuple[str, int] | None:
    """A value as Python, and where it ends."""
    if not source.startswith(quote, start):
        stop = _end_of_other(source, start)
        return None if stop is None else (source[start:stop], stop)
    end = ends.search(source, start + 1)
    if end is None:
        return None
    text = source[start + 1 : end.start()]
    # It may be two arguments of which the first one has no end.
    if any(not known or found[1] in known for found in _BEGINS.finditer(text)):
        return None
    return json.dumps(text), end.end()


def _end_of_other(source: str, start: int) -> int | None:
    """Where a value that is no text ends. A text in other quotes is none that such a format writes."""
    depth, place = 0, start
    while (piece := _OTHER.match(source, place)) is not None:
        if depth == 0 and (piece[0] in ",)" or piece[0][0] in "'\""):
            return place if piece[0] in ",)" and place > start else None
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece[0], 0)
        place = piece.end()
    return None
