"""Filters: flag trajectories between scoring and training."""

from verbatim.algorithms.filters.base import Filter, FilterVerdict, apply_filters
from verbatim.algorithms.filters.repetition import Repetition
from verbatim.algorithms.filters.simple import Gibberish, Truncated, ZeroAdvantage

FILTERS: dict[str, type[Filter]] = {
    "gibberish": Gibberish,
    "repetition": Repetition,
    "truncated": Truncated,
    "zero_advantage": ZeroAdvantage,
}

__all__ = ["FILTERS", "Filter", "FilterVerdict", "apply_filters"]
