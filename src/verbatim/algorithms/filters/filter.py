"""Defines filters and applies them to a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from verbatim.core.types import Trajectory

Action = Literal["drop", "monitor"]


Reads = Literal["logprobs", "advantages"]
"""The data that a filter may need; the filter names them in its class attribute `reads`. A run without these data skips
the filter."""


class Filter(Protocol):
    """A frozen dataclass whose fields are the filter's parameters. Its instances are called with a trajectory."""

    @property
    def action(self) -> Action:
        """What happens to flagged trajectories: they are dropped ("drop") or only counted ("monitor")."""

    def __call__(self, trajectory: Trajectory) -> bool:
        """True if this trajectory is flagged."""


@dataclass(frozen=True, kw_only=True)
class FilterVerdict:
    """The verdict of all filters on one trajectory."""

    flagged: tuple[str, ...]
    """The names of all filters that flagged the trajectory, including monitoring filters."""
    dropped_by: str | None
    """The first dropping filter that flagged the trajectory; None if it is kept."""


def apply_filters(trajectory: Trajectory, filters: Mapping[str, Filter]) -> FilterVerdict:
    """Apply all filters to a trajectory; the trajectory is dropped if any dropping filter flags it.

    Being flagged by a monitoring filter does not protect a trajectory from a dropping filter.
    """
    flagged = tuple(name for name, rule in filters.items() if rule(trajectory))
    dropping = [name for name in flagged if filters[name].action == "drop"]
    return FilterVerdict(flagged=flagged, dropped_by=dropping[0] if dropping else None)
