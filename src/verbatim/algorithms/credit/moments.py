"""Computes means and deviations of rewards so that rounding errors never decide what is trained."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from verbatim.core.records.equality import are_equal, deviation


def mean(values: Sequence[float]) -> float:
    """The mean, or exactly the first value if all values are equal.

    `fmean` of equal values may differ from these values by rounding, and an advantage of 1e-17 would count as a signal.
    """
    return values[0] if are_equal(values) else statistics.fmean(values)


def centered(values: Sequence[float]) -> list[float]:
    """Each value minus the mean, or exactly 0 if all values are equal.

    Example: `[1, 0, 0, 0]` gives `[0.75, -0.25, -0.25, -0.25]`; `[0.1 + 0.2, 0.3]` gives `[0, 0]`.
    """
    if are_equal(values):
        return [0.0] * len(values)
    level = statistics.fmean(values)
    return [value - level for value in values]


def standardized(values: Sequence[float], eps: float = 0.0) -> list[float]:
    """`centered` divided by the population standard deviation plus `eps`, or exactly 0 if all values are equal.

    Example: `[3, 1]` gives `[1, -1]`.
    """
    if are_equal(values):
        return [0.0] * len(values)
    scale = deviation(values) + eps
    return [value / scale for value in centered(values)]
