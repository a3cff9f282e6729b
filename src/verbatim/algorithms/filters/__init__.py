"""Filters: flag trajectories between scoring and training."""

from verbatim.filters.base import Filter, FilterVerdict, apply_filters
from verbatim.filters.gibberish import Gibberish
from verbatim.filters.repetition import Repetition
from verbatim.filters.zero_advantage import ZeroAdvantage

FILTERS: dict[str, type[Filter]] = {
    "gibberish": Gibberish,
    "repetition": Repetition,
    "zero_advantage": ZeroAdvantage,
}

__all__ = ["FILTERS", "Filter", "FilterVerdict", "apply_filters"]
