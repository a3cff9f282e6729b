"""Defines a filter, and applies several of them to one trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from verbatim.core.types import Trajectory

Action = Literal["drop", "monitor"]


Reads = Literal["logprobs", "advantages"]
"""Values of a filter's class attribute `reads`: a run whose rollouts lack these data leaves the filter out."""


class Filter(Protocol):
    """A frozen dataclass whose fields are its parameters; an instance is called with a trajectory."""

    @property
    def action(self) -> Action:
        """Whether flagged trajectories are dropped ("drop") or only counted ("monitor")."""

    def __call__(self, trajectory: Trajectory) -> bool:
        """True if this trajectory is flagged."""


@dataclass(frozen=True, kw_only=True)
class FilterVerdict:
    """The verdict of all filters on one trajectory."""

    flagged: tuple[str, ...]
    """Names of all filters that flagged it, including monitoring ones."""
    dropped_by: str | None
    """The first dropping filter that flagged it, or None if it is kept."""


def apply_filters(trajectory: Trajectory, filters: Mapping[str, Filter]) -> FilterVerdict:
    """Apply all filters to a trajectory; it is dropped if any dropping filter flags it.

    A hit of a monitoring filter never protects a trajectory from a dropping filter.
    """
    flagged = tuple(name for name, rule in filters.items() if rule(trajectory))
    dropping = [name for name in flagged if filters[name].action == "drop"]
    return FilterVerdict(flagged=flagged, dropped_by=dropping[0] if dropping else None)
