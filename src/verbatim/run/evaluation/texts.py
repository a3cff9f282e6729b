"""Formats estimates for reports."""

from __future__ import annotations

from verbatim.core.texts import number
from verbatim.run.evaluation.intervals import Estimate

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The names of models and runs in tables, in the order in which they were given."""


def letter(place: int) -> str:
    """The name of the model or run at this position.

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'A2')
    """
    number, place = divmod(place, len(LETTERS))
    return LETTERS[place] + (str(number + 1) if number else "")


def with_interval(found: Estimate, *, signed: bool = False) -> str:
    """
    >>> with_interval(Estimate(value=0.25, low=0.125, high=0.5))
    '0.250 [0.125, 0.500]'
    """
    value = number(found.value, signed=signed)
    if not found.has_interval:
        return value
    return f"{value} [{number(found.low, signed=signed)}, {number(found.high, signed=signed)}]"
