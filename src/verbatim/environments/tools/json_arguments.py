"""Validates a call's arguments against an untrusted JSON schema, with jsonschema's validators and a time limit, so that
no pattern, reference or long list in a schema can hang a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any

import regex
from jsonschema import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry

from verbatim.core.errors import ComponentError
from verbatim.environments.tools.tool import ToolArgumentsError

SECONDS = 1.0
"""CPU time limit, in seconds, for checking the arguments of one call. The limit is in CPU time, not wall-clock time,
because valid calls must not be refused on a machine that stalls."""
MOST_ERRORS = 20
"""Maximum number of errors reported for one call."""
MOST_VALUES = 100_000
"""Maximum number of values in a schema, counting lists, objects, strings and numbers."""
MOST_CHARACTERS = 10_000
"""Maximum length of a pattern in characters, both as written and with its repeats expanded."""

_deadline: ContextVar[float] = ContextVar("deadline")


class JsonArguments:
    """Validates arguments against a JSON schema. Remote references in the schema are never fetched.

    Hostile schemas and arguments can take forever to check (examples are a pattern that backtracks, and references that
    double at each step). After `SECONDS` of checking, the arguments count as invalid.

    Example:
        >>> schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
        >>> JsonArguments(schema, "tool look").validate({"place": 3})
        Traceback (most recent call last):
        verbatim.environments.tools.tool.ToolArgumentsError: place: 3 is not of type 'string'

    Raises:
        ComponentError: the schema does not describe an object, or cannot be checked in bounded time.
    """

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        self.schema = schema
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise ComponentError(
                f"{where}: parameters {schema!r:.80}; expected a JSON schema such as "
                '{"type": "object", "properties": {"place": {"type": "string"}}}'
            )
        try:
            _refuse_unbounded(schema)
            known = validator_for(schema)
            known.check_schema(schema)
            self._validator = _bounded(known)(_without_dialects(schema), registry=Registry())
        except SchemaError as error:
            raise ComponentError(f"{where}: its parameters are not a JSON schema: {error.message[:500]}") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise ComponentError(f"{where}: its parameters cannot be checked: {error}") from error

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments if they are valid.

        Raises:
            ToolArgumentsError: the arguments are invalid; the message has the place and the reason of each error.
        """
        token = _deadline.set(time.thread_time() + SECONDS)
        try:
            wrong = list(islice(self._validator.iter_errors(dict(arguments)), MOST_ERRORS))
        except (_TooLong, RecursionError) as error:
            why = f"this takes more than {SECONDS:g} s" if isinstance(error, _TooLong) else "its references never end"
            raise ToolArgumentsError(f"the arguments cannot be checked against the tool's schema: {why}") from error
        finally:
            _deadline.reset(token)
        if wrong:
            wrong.sort(key=lambda error: list(map(str, error.path)))
            raise ToolArgumentsError("; ".join(map(_explain, wrong)))
        return dict(arguments)


def _explain(error: ValidationError) -> str:
    where = ".".join(map(str, error.path))
    return f"{where}: {error.message[:200]}" if where else error.message[:200]


# ---- jsonschema's keywords, with a time limit. Each keyword checks the time before it starts. Keywords that match
# patterns or compare all items can take long by themselves, so they are replaced.


class _TooLong(Exception):
    """Raised when the check exceeds its CPU time."""


def _time_left() -> float:
    left = _deadline.get() - time.thread_time()
    if left <= 0:
        raise _TooLong
    return left


@cache
def _bounded(known: type[Validator]) -> Any:
    own: dict[str, Callable[..., Any]] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }
    keywords: Mapping[str, Callable[..., Any]] = {**known.VALIDATORS, **own}
    return extend(known, {name: _ticking(keyword) for name, keyword in keywords.items()})


def _ticking(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _time_left()
        return keyword(validator, value, instance, schema)

    return check


def _found(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=_time_left()) is not None
    except TimeoutError:
        raise _TooLong from None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _found(pattern, instance):
        yield ValidationError(f"{instance[:200]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        for name, value in instance.items():
            if _found(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [name for name in instance if name not in named and not any(_found(p, name) for p in patterns)]
    if validator.is_type(allowed, "object"):
        for name in extras:
            yield from validator.descend(instance[name], allowed, path=name)
    elif not allowed and extras:
        shown = ", ".join(repr(name[:80]) for name in extras[:10])
        were = "was" if len(extras) == 1 else "were"
        yield ValidationError(f"Additional properties are not allowed ({shown} {were} unexpected)")


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted and validator.is_type(instance, "array") and len(set(map(_frozen, instance))) < len(instance):
        yield ValidationError(f"{repr(instance)[:200]} has non-unique elements")


def _frozen(value: Any) -> Any:
    """Return a hashable key for a JSON value. The keys of 1 and 1.0 are equal; the keys of 1 and true differ."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _frozen(inner)) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(map(_frozen, value))
    return ("boolean", value) if isinstance(value, bool) else value


def _without_dialects(schema: Any) -> Any:
    """Remove every `$schema`: for a part of a schema that names a dialect, jsonschema would use its own validators, not
    ours."""
    if isinstance(schema, Mapping):
        return {
            name: _without_dialects(inner)
            for name, inner in schema.items()
            if name != "$schema" or not isinstance(inner, str)
        }
    return [_without_dialects(inner) for inner in schema] if isinstance(schema, (list, tuple)) else schema


# ---- schemas that take too much time or memory even with a time limit


def _refuse_unbounded(schema: Any) -> None:
    """Refuse a schema that is too large, whose patterns need too much memory, or that makes jsonschema match patterns
    without our time limit (jsonschema does this for unevaluatedProperties)."""
    waiting, num_values = [schema], 0
    unevaluated = by_pattern = False
    while waiting:
        value = waiting.pop()
        num_values += 1
        if num_values > MOST_VALUES:
            raise ValueError(f"they have more than {MOST_VALUES:,} values; expected a schema that fits into a prompt")
        if isinstance(value, Mapping):
            named = value.get("patternProperties")
            unevaluated |= "unevaluatedProperties" in value
            by_pattern |= bool(named)
            if unevaluated and by_pattern:
                raise ValueError("patternProperties with unevaluatedProperties; give additionalProperties instead")
            patterns = [value.get("pattern"), *(named if isinstance(named, Mapping) else ())]
            for pattern in (given for given in patterns if isinstance(given, str)):
                if len(pattern) > MOST_CHARACTERS or _written_out(pattern) > MOST_CHARACTERS:
                    raise ValueError(
                        f"the pattern {pattern[:80]!r} has more than {MOST_CHARACTERS:,} characters "
                        "with its repeats expanded"
                    )
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


def _written_out(pattern: str) -> int:
    """Return the length of a pattern with each `{n}` expanded: `regex` allocates that much memory before it searches.

    >>> _written_out("[a-z]{2}-(a{10}){10}")
    103
    """
    sizes, last = [0], [0]  # of each open group: its size so far, and the size of its last item
    for part in _PARTS.finditer(pattern):
        text = part[0]
        if text == "(":
            sizes.append(0)
            last.append(0)
        elif text == ")" and len(sizes) > 1:
            last[-1:], inner = [], sizes.pop()
            sizes[-1] += inner
            last[-1] = inner
        elif part["most"] is not None:
            times = int(part["most"]) if len(part["most"]) < 9 else MOST_CHARACTERS + 1
            sizes[-1] += last[-1] * (max(times, 1) - 1)
            last[-1] *= max(times, 1)
        else:
            sizes[-1] += 1
            last[-1] = 1
        if sizes[-1] > MOST_CHARACTERS:
            return sizes[-1]
    return sum(sizes)


_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?:\d*,)?(?P<most>\d+),?\}|.", re.DOTALL)
"""Matches one part of a pattern: an escape, a class, a repeat or a single character."""
