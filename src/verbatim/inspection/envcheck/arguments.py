"""Generates random arguments that match a tool's JSON schema."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

_DEEPEST = 4
"""Maximum depth of nested values; optional values at a greater depth are left out."""


def random_arguments(parameters: Mapping[str, Any], words: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Generate the arguments of one call.

    Args:
        parameters: JSON schema of an object, as in `schema["function"]["parameters"]`.
        words: The strings from which string arguments are chosen; at least one.
        rng: The random generator.

    Example: `{"type": "object", "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["number"]}` gives `{"number": 1}`, `{"number": 2}` or `{"number": 3}`.
    """
    drawn = _Draw(parameters, words, rng).value(parameters, 0)
    return drawn if isinstance(drawn, dict) else {}


class _Draw:
    def __init__(self, root: Mapping[str, Any], words: Sequence[str], rng: random.Random) -> None:
        self._root, self._words, self._rng = root, words, rng

    def value(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return self._rng.choice(self._words)
        if "$ref" in schema:
            return self.value(self._referenced(str(schema["$ref"])), depth + 1) if depth <= 2 * _DEEPEST else None
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(list(schema["enum"]))
        for either in ("anyOf", "oneOf"):
            if schema.get(either):
                options = list(schema[either])
                plain = [
                    option
                    for option in options
                    if isinstance(option, Mapping) and option.get("type") not in ("object", "array", None)
                ]
                return self.value(self._rng.choice(plain if plain and depth >= _DEEPEST else options), depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self._rng.choice(kind)
        return self._of_kind(kind or ("object" if "properties" in schema else "string"), schema, depth)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        rng = self._rng
        match kind:
            case "integer":
                low, high = self._bounds(schema, 1)
                step = int(schema.get("multipleOf", 1)) or 1
                first, last = int(-(-low // step)), int(high // step)
                return rng.randint(first, max(first, last)) * step
            case "number":
                low, high = self._bounds(schema, 1e-6)
                return round(rng.uniform(low, high), 3) if high - low > 0.01 else rng.uniform(low, high)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "array":
                most = min(int(schema.get("maxItems", 3)), 8)
                least = int(schema.get("minItems", 0 if depth >= _DEEPEST else 1))
                items = schema.get("prefixItems") or [schema.get("items", {"type": "string"})]
                count = len(items) if schema.get("prefixItems") else rng.randint(least, max(least, most))
                return [self.value(items[min(i, len(items) - 1)], depth + 1) for i in range(count)]
            case "object":
                return self._object(schema, depth)
            case _:
                return self._string(schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        return {
            name: self.value(about, depth + 1)
            for name, about in schema.get("properties", {}).items()
            if name in required or (depth < _DEEPEST and self._rng.random() < 0.5)
        }

    def _bounds(self, schema: Mapping[str, Any], step: float) -> tuple[float, float]:
        """The smallest and the largest allowed number.

        If one bound is missing, it is set 20 away from the other bound. If both are missing, the bounds are -5 and 15.
        """
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is None and "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + step
        if high is None and "exclusiveMaximum" in schema:
            high = schema["exclusiveMaximum"] - step
        if low is None:
            low = -5 if high is None else high - 20
        return low, low + 20 if high is None else high

    def _string(self, schema: Mapping[str, Any]) -> str:
        formats = {
            "date": "2024-02-29",
            "date-time": "2024-02-29T12:00:00Z",
            "time": "12:00:00Z",
            "uuid": "6f1d5b0e-3b2a-4c8e-9a51-0d8b7c1e2f30",
            "duration": "P1D",
        }
        if schema.get("format") in formats:
            return formats[schema["format"]]
        text = self._rng.choice(self._words)
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        text = text + "x" * (least - len(text))
        return text if most is None else text[: int(most)]

    def _referenced(self, path: str) -> Any:
        found: Any = self._root
        for part in path.removeprefix("#/").split("/"):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        return found
