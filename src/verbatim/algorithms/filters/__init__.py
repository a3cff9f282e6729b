"""Filters that flag trajectories between scoring and training."""

from verbatim.algorithms.filters.filter import Filter, FilterVerdict, apply_filters
from verbatim.algorithms.filters.gibberish import Gibberish
from verbatim.algorithms.filters.repetition import Repetition
from verbatim.algorithms.filters.truncated import Truncated
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage

FILTERS: dict[str, type[Filter]] = {
    "gibberish": Gibberish,
    "repetition": Repetition,
    "truncated": Truncated,
    "zero_advantage": ZeroAdvantage,
}

__all__ = ["FILTERS", "Filter", "FilterVerdict", "apply_filters"]
