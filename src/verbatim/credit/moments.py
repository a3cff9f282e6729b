"""Computes means and deviations of a few rewards, exactly where that decides what is trained."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The mean; that of equal numbers is the number itself.

    Added up and divided they may miss it by a rounding error, and an advantage of 1e-17 would pass for a signal.
    """
    return values[0] if min(values) == max(values) else statistics.fmean(values)


def centered(values: Sequence[float]) -> list[float]:
    """Each value minus their mean.

    Example: `[1, 0, 0, 0]` gives `[0.75, -0.25, -0.25, -0.25]`.
    """
    level = mean(values)
    return [value - level for value in values]


def standardized(values: Sequence[float], eps: float = 0.0) -> list[float]:
    """`centered` over the population's standard deviation plus `eps`; 0 where all values are equal.

    Example: `[3, 1]` gives `[1, -1]`.
    """
    above = centered(values)
    if not any(above):
        return above
    scale = statistics.pstdev(values) + eps
    return [value / scale for value in above]
