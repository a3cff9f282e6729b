"""How deep values are nested that messages hold and models sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_DEPTH = 64
"""The deepest nesting of arguments; deeper values would overflow the stack of later readers."""
_LEAVES = frozenset({str, int, float, bool, type(None)})
"""What most values are; to ask for `Mapping` takes many times as long."""


def is_shallow(value: object) -> bool:
    """Whether a value is nested less than `MAX_DEPTH` deep; one that holds itself is not."""
    return all(depth < MAX_DEPTH for depth, _ in enumerate(levels(value)))


def levels(value: object) -> Iterator[list[object]]:
    """The value, then all that is in it, then all that is in that, and so on; each object once a level."""
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
