"""Finds rotary position encodings that depend on the longest sequence of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def fixed_length(config: Any) -> int | None:
    """The longest sequence, in tokens, for which `dynamic` or `longrope` leave the positions unchanged;

    None if the configuration uses neither type.
    """
    lengths = []
    for parameters in _encodings(getattr(config, "rope_parameters", None)):
        kind = parameters.get("rope_type")
        if kind == "dynamic":
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(parameters["original_max_position_embeddings"])
    return min(lengths, default=None)


def probe_length(config: Any, most: int) -> int:
    """The length of a probe in tokens: at most `most`, and short enough that all positions stay unchanged."""
    return min(n for n in (most, getattr(config, "max_position_embeddings", None), fixed_length(config)) if n)


def rope_name(config: Any) -> str:
    """The RoPE type of a model whose RoPE changes positions, formatted for an error message: " ('longrope' rope)"; ""
    for any other model."""
    names = {str(p.get("rope_type")) for p in _encodings(getattr(config, "rope_parameters", None))}
    found = sorted(names & {"dynamic", "longrope"})
    return f" ({found[0]!r} rope)" if found else ""


def _encodings(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """All RoPE settings of a configuration. A configuration has one RoPE setting for all layers, or one for each kind
    of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for value in parameters.values():
            yield from _encodings(value)
