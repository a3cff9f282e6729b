"""Converts type hints to JSON schemas, in the forms that `transformers.utils.get_json_schema` writes.

Models were trained on prompts with these forms, so a `FunctionTool` must give the same prompt as transformers does for
the same function. pydantic adds types that transformers refuses: models, dataclasses, typed dicts, dates, constraints.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union

import typing_extensions
from pydantic import WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_BARE: Mapping[Any, Mapping[str, str]] = {
    list: {"type": "array"},
    typing.List: {"type": "array"},  # noqa: UP006
    tuple: {"type": "array"},
    typing.Tuple: {"type": "array"},  # noqa: UP006
    dict: {"type": "object"},
    typing.Dict: {"type": "object"},  # noqa: UP006
}
_REFERENCE = "#/$defs/"


class ToolSchema(GenerateJsonSchema):
    """pydantic's generator of schemas, changed to transformers' forms: `"nullable": true`, lists of types, and values
    instead of constants.

    Example: `int | None` becomes `{"type": "integer", "nullable": true}`, and `int | str` becomes
    `{"type": ["integer", "string"]}`.
    """

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Write an optional type as the inner schema with `"nullable": true`."""
        inner = self.generate_inner(schema["schema"])
        return inner if inner == {"type": "null"} else {**inner, "nullable": True}

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        """Write a union as a list of types if every branch consists only of a type, else as `anyOf`."""
        branches = [
            self.generate_inner(choice[0] if isinstance(choice, tuple) else choice) for choice in schema["choices"]
        ]
        if all(branch.keys() == {"type"} and isinstance(branch["type"], str) for branch in branches):
            names = sorted({branch["type"] for branch in branches})
            return {"type": names[0] if len(names) == 1 else names}
        return {"anyOf": branches}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        """Write a `Literal` as its values and their types, even if it has a single value."""
        values = [value.value if isinstance(value, Enum) else value for value in schema["expected"]]
        return _values(values) or super().literal_schema(schema)

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        """Write an enumeration as the values of its members and their types."""
        return _values([member.value for member in schema["cls"]]) or super().enum_schema(schema)

    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonSchemaValue:
        """Write a tuple as a type for each item, without the redundant `minItems` and `maxItems`."""
        found = super().tuple_schema(schema)
        if "variadic_item_index" in schema:
            return found
        return {key: value for key, value in found.items() if key not in ("minItems", "maxItems")}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Write a dict as the type of its values (`{}` for any type), without `propertyNames`."""
        found = {key: value for key, value in super().dict_schema(schema).items() if key != "propertyNames"}
        return {**found, "additionalProperties": {}} if found.get("additionalProperties") is True else found

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        """Return the schema unsorted, so that its keys stay in the order of definition."""
        return value


def readable(hint: Any) -> Any:
    """Convert a type hint into a type hint that pydantic accepts. A bare `list` keeps its own schema, which differs
    from the schema of `list[Any]`.

    Before Python 3.12, pydantic accepts only the `TypedDict` of `typing_extensions`, so a `TypedDict` of `typing` is
    converted.
    """
    return _readable(hint, {})


def _readable(hint: Any, known: dict[Any, Any]) -> Any:
    for bare, schema in _BARE.items():
        if hint is bare:
            return Annotated[hint, WithJsonSchema(dict(schema))]
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        return _typed_dict(hint, known)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (None, Literal) or not arguments:
        return hint
    if origin is Annotated:
        return Annotated[(_readable(arguments[0], known), *hint.__metadata__)]
    inner = tuple(_readable(argument, known) if not isinstance(argument, list) else argument for argument in arguments)
    if inner == arguments:
        return hint
    if origin in (Union, UnionType):
        return Union[inner]  # noqa: UP007
    return origin[inner if len(inner) > 1 else inner[0]]


def _typed_dict(hint: Any, known: dict[Any, Any]) -> Any:
    if hint not in known:
        known[hint] = made = typing_extensions.TypedDict(hint.__name__, {})  # type: ignore[operator]
        made.__doc__, made.__module__, made.__qualname__ = hint.__doc__, hint.__module__, hint.__qualname__
        made.__required_keys__, made.__optional_keys__ = hint.__required_keys__, hint.__optional_keys__
        hints = typing.get_type_hints(hint, include_extras=True)
        made.__annotations__ = {name: _readable(inner, known) for name, inner in hints.items()}
    return known[hint]


def untitled(schema: Any, names_first: bool = False) -> Any:
    """Remove the titles that pydantic derives from names, because they only cost tokens. Properties that are called
    "title" are kept: with `names_first`, the keys of `schema` are names of properties and not keywords."""
    if isinstance(schema, list):
        return [untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: untitled(value, names_first=not names_first and key in ("properties", "$defs"))
        for key, value in schema.items()
        if names_first or key != "title"
    }


def with_enums_inside(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Move enumerations from `$defs` to where they are used, as transformers does, and without their docstrings."""
    definitions = schema.get("$defs", {})
    enums = {
        f"{_REFERENCE}{name}": {key: inner[key] for key in ("type", "enum") if key in inner}
        for name, inner in definitions.items()
        if "enum" in inner
    }
    kept = {name: inner for name, inner in definitions.items() if "enum" not in inner}

    def inside(value: Any) -> Any:
        if isinstance(value, list):
            return [inside(item) for item in value]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("$ref"), str) and value["$ref"] in enums:
            return {**enums[value["$ref"]], **{key: item for key, item in value.items() if key != "$ref"}}
        return {key: inside(item) for key, item in value.items()}

    rest = {key: value for key, value in schema.items() if key != "$defs"}
    found: JsonSchemaValue = inside({**rest, "$defs": kept} if kept else rest)
    return found


def _values(values: Sequence[Any]) -> JsonSchemaValue | None:
    """Return the schema of a choice between values; None if a value is not a JSON scalar."""
    if not values or any(type(value) not in _SCALARS for value in values):
        return None
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}
