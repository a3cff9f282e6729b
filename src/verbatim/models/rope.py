"""What a configuration says of rotary positions that look at the longest sequence of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOVING = ("dynamic", "longrope")
"""Scalings that do."""


def fixed_length(config: Any) -> int | None:
    """The longest sequence that a configuration's `dynamic` or `longrope` encodings leave as it is; None = they are
    not in it."""
    lengths = []
    for parameters in _encodings(getattr(config, "rope_parameters", None)):
        kind = parameters.get("rope_type")
        if kind == "dynamic":
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(parameters["original_max_position_embeddings"])
    return min(lengths, default=None)


def rope_name(config: Any) -> str:
    """The scaling that moves, to be named in a message: " ('longrope' rope)", or nothing."""
    names = {str(p.get("rope_type")) for p in _encodings(getattr(config, "rope_parameters", None))}
    found = sorted(names & set(MOVING))
    return f" ({found[0]!r} rope)" if found else ""


def _encodings(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """One for all layers, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for value in parameters.values():
            yield from _encodings(value)
