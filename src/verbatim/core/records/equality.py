"""Compares rewards, returns and advantages, ignoring differences that are only rounding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

TOLERANCE = 1e-6
"""The tolerance; it is multiplied by the largest magnitude of the compared numbers if that magnitude is above 1."""


def are_equal(values: Iterable[float]) -> bool:
    """True if the numbers differ only by rounding: `max - min <= 1e-6 * max(1, largest magnitude)`.

    A sum depends on the order of its terms, so rewards that are meant to be equal may differ in the last bits. No
    advantage, filter or pool may depend on those bits. NaN and infinity are equal to nothing.

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
    """`value - other`, or exactly 0 if they are equal.

    Example:
        >>> difference(0.1 + 0.2, 0.3), difference(1.0, 0.25)
        (0.0, 0.75)
    """
    return 0.0 if are_equal((value, other)) else value - other


def deviation(values: Sequence[float]) -> float:
    """The population standard deviation, or exactly 0 if all values are equal.

    Example:
        >>> deviation([3.0, 1.0]), deviation([0.1 + 0.2, 0.3])
        (1.0, 0.0)
    """
    return 0.0 if are_equal(values) else statistics.pstdev(values)


def is_at_least(value: float, bound: float) -> bool:
    """True if a number is above a bound or equal to it.

    Example:
        >>> is_at_least(0.7 + 0.2 + 0.1, 1.0), is_at_least(0.99, 1.0)
        (True, False)
    """
    return value >= bound or are_equal((value, bound))


def is_at_most(value: float, bound: float) -> bool:
    """True if a number is below a bound or equal to it."""
    return value <= bound or are_equal((value, bound))
