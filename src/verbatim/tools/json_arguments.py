"""Validates a call's arguments against an untrusted JSON schema, within a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from verbatim.errors import ComponentError
from verbatim.tools.base import ToolArgumentsError

if TYPE_CHECKING:
    from jsonschema import ValidationError

MOST_ERRORS = 20
"""Most errors that are reported for one call."""
MOST_VALUES = 100_000
"""Most values of one schema: lists, objects, texts and numbers."""


class JsonArguments:
    """Validates arguments against a JSON schema.

    Hostile schemas and arguments can take for ever to check (a pattern that backtracks, references that double at each
    step): after `bounded_schema.SECONDS` the arguments count as invalid.

    Example:
        >>> schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
        >>> JsonArguments(schema, "tool look").validate({"place": 3})
        Traceback (most recent call last):
        verbatim.tools.base.ToolArgumentsError: place: 3 is not of type 'string'

    Raises:
        ComponentError: not a schema of an object, or one that cannot be checked in bounded time.
    """

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        from jsonschema import SchemaError  # imported here: most tools are typed functions and need no jsonschema

        from verbatim.tools.bounded_schema import bounded_validator

        self.schema = schema
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise ComponentError(f"{where}: parameters {schema!r:.80}; expected a JSON schema such as "
                                 '{"type": "object", "properties": {"place": {"type": "string"}}}')  # fmt: skip
        _refuse_large(schema, where)
        try:
            self._validator = bounded_validator(schema)
        except SchemaError as error:
            raise ComponentError(f"{where}: its parameters are no JSON schema: {error.message[:500]}") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise ComponentError(f"{where}: its parameters cannot be checked: {error}") from error

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments if they are valid.

        Raises:
            ToolArgumentsError: they are invalid; says where and why.
        """
        from verbatim.tools.bounded_schema import TooLong, timed

        try:
            with timed():
                wrong = list(islice(self._validator.iter_errors(dict(arguments)), MOST_ERRORS))
        except (TooLong, RecursionError) as error:
            why = str(error) if isinstance(error, TooLong) else "its references never end"
            raise ToolArgumentsError(f"they cannot be checked against the tool's schema: {why}") from error
        if wrong:
            wrong.sort(key=lambda error: list(map(str, error.path)))
            raise ToolArgumentsError("; ".join(map(_explain, wrong)))
        return dict(arguments)


def _refuse_large(schema: Mapping[str, Any], where: str) -> None:
    waiting: list[Any] = [schema]
    seen = 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise ComponentError(f"{where}: its parameters hold more than {MOST_VALUES:,} values; expected a schema "
                                 "that fits into a prompt")  # fmt: skip
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()


def _explain(error: ValidationError) -> str:
    where = ".".join(map(str, error.path))
    return f"{where}: {error.message[:200]}" if where else error.message[:200]
