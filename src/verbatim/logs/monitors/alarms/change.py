"""Decides whether a figure has risen or fallen: by ranks, so that single outliers and the figure's scale do not matter.

Every rule that looks for a change asks two questions. Is it large enough to matter (a parameter of the rule)? And is
it more than the noise between steps? The second one is a one-sided Mann-Whitney test of the recent steps against the
earlier ones, at `SURE`. If the figure does not change, each order of the values is equally likely, and the test is
passed by chance in at most one of 1,000 windows; with 8 steps against 8, the 16 values have to be all but completely
apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

SURE = 1e-3
"""The largest chance at which a change is believed."""


def rises(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the values are larger than before, by more than chance.

    >>> rises([0.1, 0.2, 0.15, 0.12, 0.18, 0.16, 0.11, 0.14], [0.3, 0.28, 0.31, 0.4, 0.33, 0.29, 0.27, 0.35])
    True
    """
    return chance_of_rise(before, after) <= SURE


def falls(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether they are smaller."""
    return chance_of_rise(after, before) <= SURE


def chance_of_rise(before: Sequence[float], after: Sequence[float]) -> float:
    """How likely so many pairs are in rising order if nothing has changed: the p-value of a Mann-Whitney test.

    A pair is a value of `before` and one of `after`; equal values count against the rise. Example: of [1, 2] and
    [3, 4] all 4 pairs are in rising order, which 1 of the 6 orders has: 1/6.

    Mann and Whitney, 1947; the distribution is exact.
    """
    rising = sum(a > b for a in after for b in before)
    return _orders(len(before), len(after), rising) / math.comb(len(before) + len(after), len(before))


@functools.cache
def _orders(before: int, after: int, rising: int) -> int:
    """How many orders of so many values have at least so many rising pairs. The largest value is one of those after,
    and each of those before makes a rising pair with it, or one of those before, and makes none."""
    if rising <= 0:
        return math.comb(before + after, before)
    if rising > before * after:
        return 0
    return _orders(before, after - 1, rising - before) + _orders(before - 1, after, rising)
