"""Defines a filter, and applies several of them to one trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from verbatim.core.types import Trajectory

Action = Literal["drop", "monitor"]


Reads = Literal["logprobs", "advantages"]
"""What a class of filters may name as `reads`: it is left out of runs whose rollouts do not have these."""


class Filter(Protocol):
    """A frozen dataclass whose fields are its parameters; calling it says whether it flags a trajectory."""

    @property
    def action(self) -> Action:
        """Whether flagged trajectories are dropped, or only counted."""

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether this trajectory is flagged."""


@dataclass(frozen=True, kw_only=True)
class FilterVerdict:
    """What all filters said of one trajectory."""

    flagged: tuple[str, ...]
    """Names of every filter that flagged it, monitoring ones included."""
    dropped_by: str | None
    """The first dropping filter that flagged it; None: it is trained."""


def apply_filters(trajectory: Trajectory, filters: Mapping[str, Filter]) -> FilterVerdict:
    """All filters look at every trajectory; it is dropped if any dropping filter flags it.

    A monitoring hit never shields a trajectory from a dropping one.
    """
    flagged = tuple(name for name, rule in filters.items() if rule(trajectory))
    dropping = [name for name in flagged if filters[name].action == "drop"]
    return FilterVerdict(flagged=flagged, dropped_by=dropping[0] if dropping else None)
