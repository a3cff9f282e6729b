"""Finds how much of a growing completion is settled: the texts that no further token can change.

While a completion grows, its last characters may turn out to be the beginning of a call, of a mark of thinking, or of a
character of several bytes. What is returned here is how every longer completion is read too, so it can be streamed.
"""

from __future__ import annotations

from collections.abc import Iterable

_BROKEN = "\ufffd"
"""What stands for bytes that are no character, or not yet one."""


def settled(text: str, marks: Iterable[str] = ()) -> str:
    """A text without what may change: from the first mark on, the beginning of one at the end, and before these white
    space and bytes that are no character.

    Marks are found however they are spaced, so white space in them and in the text does not count.

    >>> settled("so I\\n<to", ["<tool_call>"]), settled("a < b.", ["<tool_call>"]), settled("a <call>x", ["<call>"])
    ('so I', 'a < b.', 'a')
    """
    end = len(text)
    for mark in ("".join(given.split()) for given in marks):
        if mark:
            end = min(end, _beginning(text, mark))
    return text[:end].rstrip().rstrip(_BROKEN).rstrip()


def _beginning(text: str, mark: str) -> int:
    """The first place from which a text goes on as a mark, white space aside; its length if there is none."""
    place = text.find(mark[0])
    while place >= 0:
        left = "".join(text[place : place + 4 * len(mark) + 64].split())
        if mark.startswith(left[: len(mark)]):
            return place
        place = text.find(mark[0], place + 1)
    return len(text)
