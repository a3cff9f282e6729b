"""Finds how much of a growing completion is settled, that is, can no longer be changed by further tokens.

The last characters of an unfinished completion may turn out to begin a call, a mark of thinking, or a multi-byte
character. Settled text is parsed the same way in every longer completion, so it can be streamed.
"""

from __future__ import annotations

from collections.abc import Iterable

_BROKEN = "\ufffd"
"""The replacement character, which decoding puts in place of bytes that are not, or not yet, a complete character."""


def settled(text: str, marks: Iterable[str] = ()) -> str:
    """The part of a text that cannot change.

    This part ends before the first mark (or before the beginning of a mark at the end of the text), and before any
    white space and incomplete characters at that place. The search ignores white space inside marks and text.

    >>> settled("so I\\n<to", ["<tool_call>"]), settled("a < b.", ["<tool_call>"]), settled("a <call>x", ["<call>"])
    ('so I', 'a < b.', 'a')
    """
    end = len(text)
    for mark in ("".join(given.split()) for given in marks):
        if mark:
            end = min(end, _beginning(text, mark))
    return text[:end].rstrip().rstrip(_BROKEN).rstrip()


def _beginning(text: str, mark: str) -> int:
    """The first index at which a mark starts, or from which the text is the beginning of a mark; else the length."""
    place = text.find(mark[0])
    while place >= 0:
        left = "".join(text[place : place + 4 * len(mark) + 64].split())
        if mark.startswith(left[: len(mark)]):
            return place
        place = text.find(mark[0], place + 1)
    return len(text)
