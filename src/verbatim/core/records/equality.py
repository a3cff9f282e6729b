"""Decides which rewards, returns and advantages are equal: those that differ by rounding alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

TOLERANCE = 1e-6
"""Numbers are equal if they are this close, times the largest magnitude among them where that is above 1."""


def are_equal(values: Iterable[float]) -> bool:
    """Whether no two of the numbers differ by more than rounding: `max - min <= 1e-6 * max(1, largest magnitude)`.

    A sum depends on the order of its terms, so rewards that are meant to be the same may differ in the last bit. No
    advantage, no filter, no pool and no verdict may depend on that bit. NaN and infinity are equal to nothing.

    Example:
        >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.3, 0.30001]), are_equal([2e7, 2e7 + 4])
        (True, False, True)
    """
    listed = list(values)
    if not listed:
        return True
    if not all(map(math.isfinite, listed)):
        return False
    low, high = min(listed), max(listed)
    return high - low <= TOLERANCE * max(1.0, abs(low), abs(high))


def difference(value: float, other: float) -> float:
    """`value - other`; exactly 0 where they are equal.

    Example:
        >>> difference(0.1 + 0.2, 0.3), difference(1.0, 0.25)
        (0.0, 0.75)
    """
    return 0.0 if are_equal((value, other)) else value - other


def deviation(values: Sequence[float]) -> float:
    """The population's standard deviation; exactly 0 where all values are equal.

    Example:
        >>> deviation([3.0, 1.0]), deviation([0.1 + 0.2, 0.3])
        (1.0, 0.0)
    """
    return 0.0 if are_equal(values) else statistics.pstdev(values)


def is_at_least(value: float, bound: float) -> bool:
    """Whether a number is above a bound, or equal to it.

    Example:
        >>> is_at_least(0.7 + 0.2 + 0.1, 1.0), is_at_least(0.99, 1.0)
        (True, False)
    """
    return value >= bound or are_equal((value, bound))


def is_at_most(value: float, bound: float) -> bool:
    """Whether a number is below a bound, or equal to it."""
    return value <= bound or are_equal((value, bound))
