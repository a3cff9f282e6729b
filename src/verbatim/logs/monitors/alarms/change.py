"""Tests by ranks whether a figure has risen or fallen, so that outliers and the figure's scale do not matter.

Every rule that detects a change asks two questions. Is the change large enough to matter (a parameter of the rule)? Is
the change larger than the noise between steps? The second question is answered by a one-sided Mann-Whitney test of the
recent steps against earlier steps, at the level `SURE`. If nothing changes, all orders of the values are equally
likely, and the test passes by chance in at most one of 1,000 windows. With 8 steps against 8, it passes only if the two
sets of values hardly overlap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

SURE = 1e-3
"""Significance level: the largest p-value at which a change is significant."""


def rises(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the values of `after` are significantly larger than the values of `before`.

    >>> rises([0.1, 0.2, 0.15, 0.12, 0.18, 0.16, 0.11, 0.14], [0.3, 0.28, 0.31, 0.4, 0.33, 0.29, 0.27, 0.35])
    True
    """
    return chance_of_rise(before, after) <= SURE


def falls(before: Sequence[float], after: Sequence[float]) -> bool:
    """True if the values of `after` are significantly smaller than the values of `before`."""
    return chance_of_rise(after, before) <= SURE


def chance_of_rise(before: Sequence[float], after: Sequence[float]) -> float:
    """The p-value of a one-sided Mann-Whitney test: the probability of at least this many rising pairs if nothing
    changed.

    A pair is a value of `before` and a value of `after`. It rises if the second is larger; equal values do not count as
    rising. Example: for [1, 2] and [3, 4] all 4 pairs rise, which is the case in 1 of the 6 possible orders, so the
    result is 1/6.

    Mann and Whitney, 1947; computed from the exact distribution instead of the normal approximation.
    """
    rising = sum(a > b for a in after for b in before)
    return _orders(len(before), len(after), rising) / math.comb(len(before) + len(after), len(before))


@functools.cache
def _orders(before: int, after: int, rising: int) -> int:
    """Number of orders of `before` and `after` values that have at least `rising` rising pairs. The recursion removes
    the largest value: if it is from `after`, it forms a rising pair with each value of `before`; otherwise it forms
    none."""
    if rising <= 0:
        return math.comb(before + after, before)
    if rising > before * after:
        return 0
    return _orders(before, after - 1, rising - before) + _orders(before - 1, after, rising)
