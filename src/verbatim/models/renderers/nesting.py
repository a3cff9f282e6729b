"""Measures how deeply values in messages and sampled calls are nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_DEPTH = 64
"""Maximum accepted nesting. Deeper values could overflow the stack of code that reads them recursively later."""
_LEAVES = frozenset({str, int, float, bool, type(None)})
"""Types without members. A value's type is looked up here first, because `isinstance(value, Mapping)` takes many times
as long."""


def is_shallow(value: object) -> bool:
    """True if a value is nested less than `MAX_DEPTH` deep. False for a value that contains itself."""
    return all(depth < MAX_DEPTH for depth, _ in enumerate(levels(value)))


def levels(value: object) -> Iterator[list[object]]:
    """The value, then its members, then their members, and so on.

    Each object appears at most once per level, so that the number of shared members does not grow exponentially.
    """
    level = [value]
    while level:
        yield level
        inner = [
            item
            for outer in level
            if type(outer) not in _LEAVES and isinstance(outer, (Mapping, list, tuple))
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        level = list({id(item): item for item in inner}.values())
