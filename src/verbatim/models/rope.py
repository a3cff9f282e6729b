"""Finds rotary position encodings that depend on the longest sequence of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def fixed_length(config: Any) -> int | None:
    """Most tokens of a sequence that `dynamic` or `longrope` encodings of a configuration leave unchanged; None: there
    are none."""
    lengths = []
    for parameters in _encodings(getattr(config, "rope_parameters", None)):
        kind = parameters.get("rope_type")
        if kind == "dynamic":
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(parameters["original_max_position_embeddings"])
    return min(lengths, default=None)


def probe_length(config: Any, most: int) -> int:
    """Tokens of a probe: at most these, and no more than the positions of a configuration take unchanged."""
    return min(n for n in (most, getattr(config, "max_position_embeddings", None), fixed_length(config)) if n)


def rope_name(config: Any) -> str:
    """The scaling that changes positions, for a message: " ('longrope' rope)", or ""."""
    names = {str(p.get("rope_type")) for p in _encodings(getattr(config, "rope_parameters", None))}
    found = sorted(names & {"dynamic", "longrope"})
    return f" ({found[0]!r} rope)" if found else ""


def _encodings(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The encoding of all layers, or of each kind of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for value in parameters.values():
            yield from _encodings(value)
