"""Escapes the strings in Python-style calls, for formats that write them unescaped between quotes (LFM2.5):

    [edit(old='it's
    here', count=2)]

This is not valid Python. A string ends at a quote that is followed by the next argument or by the end of the call.
Inside lists and objects these formats write Python and JSON with escapes.
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
"""A piece of a value that is not a string."""


def escaped(source: str, quote: str, known: Callable[[str], frozenset[str]]) -> str | None:
    """The list of calls as valid Python, with escaped strings; None if `source` is not what the format would write.

    Args:
        source: The text between the marks.
        quote: The quote around the strings of arguments.
        known: Maps a tool's name to its parameters, or to an empty set if they are not known.

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
    """A value as Python, and the index after it; None if it is not a value of this format."""
    if not source.startswith(quote, start):
        stop = _end_of_other(source, start)
        return None if stop is None else (source[start:stop], stop)
    end = ends.search(source, start + 1)
    if end is None:
        return None
    text = source[start + 1 : end.start()]
    # Ambiguous: this may also be two arguments, the first without its closing quote.
    if any(not known or found[1] in known for found in _BEGINS.finditer(text)):
        return None
    return json.dumps(text), end.end()


def _end_of_other(source: str, start: int) -> int | None:
    """The index after a value that is not a string; None if the value is a string in quotes that the format does not
    use, which is invalid."""
    depth, place = 0, start
    while (piece := _OTHER.match(source, place)) is not None:
        if depth == 0 and (piece[0] in ",)" or piece[0][0] in "'\""):
            return place if piece[0] in ",)" and place > start else None
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece[0], 0)
        place = piece.end()
    return None
