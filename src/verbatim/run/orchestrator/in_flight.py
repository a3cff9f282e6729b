"""Defines the records of launched groups, and counts the groups in flight in a way that stays cheap even if there are
many."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from verbatim.algorithms.curriculum import ScheduledExample
from verbatim.core.types import Group
from verbatim.rollouts import GroupRun


@dataclass(frozen=True, kw_only=True, eq=False)
class Launched:
    """A group in flight. At first it has only its example; its episodes are created later."""

    drawn: ScheduledExample
    """The group's example. The example's `index` counts launches, so a group with a smaller index was launched
    earlier."""
    version: int
    """The policy version in use at the launch: no token of the group was sampled by an older version."""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun(Launched):
    """A group whose episodes run, or wait for a slot."""

    run: GroupRun

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return self.run.num_sampled_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedGroup(Begun):
    """A group whose episodes have ended."""

    group: Group


class InFlight:
    """The launch indices of the groups in flight, sorted, by the policy version at their launch.

    Example:
        >>> groups = InFlight()
        >>> for index, version in ((4, 1), (5, 1), (6, 2)):
        ...     groups.add(index, version)
        >>> groups.remove(4, 1)
        >>> len(groups), groups.num_since(2), groups.first(1), groups.first_since(1), groups.num_later(5)
        (2, 1, 5, 5, 1)
    """

    def __init__(self) -> None:
        self._indices: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._indices.values()))

    def add(self, index: int, version: int) -> None:
        """Add a group that was launched with this policy version."""
        insort(self._indices.setdefault(version, []), index)  # mostly at the end; a repeated group has a lower index

    def remove(self, index: int, version: int) -> None:
        """Remove a group that is no longer in flight."""
        indices = self._indices[version]
        place = bisect_left(indices, index)
        assert indices[place] == index
        del indices[place]
        if not indices:
            del self._indices[version]

    def num_since(self, version: int) -> int:
        """Number of groups launched with this policy version or a newer version."""
        return sum(len(indices) for launched, indices in self._indices.items() if launched >= version)

    def first(self, version: int) -> int | None:
        """The lowest index among the groups of this version; None if there are no such groups."""
        return self._indices[version][0] if version in self._indices else None

    def first_since(self, version: int) -> int | None:
        """The lowest index among the groups of this version and of newer versions; None if there are no such groups."""
        return min((indices[0] for launched, indices in self._indices.items() if launched >= version), default=None)

    def num_later(self, index: int) -> int:
        """Number of groups with a higher index."""
        return sum(len(indices) - bisect_right(indices, index) for indices in self._indices.values())

    def clear(self) -> None:
        """Remove all groups."""
        self._indices.clear()
