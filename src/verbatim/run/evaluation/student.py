"""Computes quantiles of Student's t distribution, which the standard library lacks."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

LEVEL = 0.95
"""The confidence level of every interval."""
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
_NORMAL_FROM = 2000
"""From this many degrees of freedom on, two terms of the expansion around the normal distribution are exact to 1e-9."""


@functools.lru_cache(maxsize=1024)
def t_quantile(degrees: int) -> float:
    """The number t for which a variable with Student's t distribution lies between -t and t with probability `LEVEL`.

    Abramowitz & Stegun 1964, 26.7.3 and 26.7.4 (probability for whole degrees of freedom), solved by bisection; 26.7.5
    for many degrees.

    Example: `t_quantile(1)` is 12.706, `t_quantile(9)` is 2.262, and the limit for many degrees is 1.960.

    Args:
        degrees: Degrees of freedom, at least 1.
    """
    assert degrees >= 1
    if degrees >= _NORMAL_FROM:
        return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)
    low, high = _Z, 13.0  # brackets the solution: the normal limit, and just above the quantile for 1 degree
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _within(middle, degrees) > LEVEL else (middle, high)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """The probability that a variable with Student's t distribution lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for divisor in range(3 if is_odd else 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (divisor - 1) / divisor
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
