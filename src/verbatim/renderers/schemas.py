"""Looks up, in the schemas of tools, the types of arguments that a model writes as bare text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS: Mapping[str, tuple[str, Any]] = {
    "true": ("boolean", True), "false": ("boolean", False), "null": ("null", None), "none": ("null", None),
}  # fmt: skip
"""Templates that write arguments as text write Python's words; the JSON type that makes one more than a word."""


def types_of(tools: object, name: object, parameter: str) -> frozenset[str]:
    """The JSON types that a parameter of a tool may have; empty if the schema declares none.

    Schemas come from environments: one that is malformed says nothing.

    >>> look = {"name": "look", "parameters": {"properties": {"at": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}}
    >>> sorted(types_of([{"type": "function", "function": look}], "look", "at"))
    ['null', 'string']
    """
    for tool in _list(tools):
        function = _mapping(_mapping(tool).get("function", tool))
        if function and function.get("name") == name:
            schema = _mapping(_mapping(_mapping(function.get("parameters")).get("properties")).get(parameter))
            branches = [schema, *(_mapping(branch) for key in ("anyOf", "oneOf") for branch in _list(schema.get(key)))]
            kinds = [kind for branch in branches for kind in _list(branch.get("type"), branch.get("type"))]
            return frozenset(kind for kind in kinds if isinstance(kind, str)) & _TYPES
    return frozenset()


def word(text: str, types: frozenset[str]) -> tuple[bool, Any]:
    """Whether a text is a word for a value of one of these types, and the value.

    >>> word("True", frozenset({"boolean"})), word("None", frozenset({"integer"}))
    ((True, True), (False, None))
    """
    kind, value = _WORDS.get(text.strip().lower(), ("", None))
    return (True, value) if kind in types else (False, None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object, *otherwise: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, (list, tuple)) else otherwise
