"""Runs jsonschema's validators with a deadline: a pattern, a reference or a long list in a schema cannot hang a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import regex
from jsonschema import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry

SECONDS = 1.0
"""Seconds to check the arguments of one call."""
MOST_CHARACTERS = 10_000
"""Most characters of a pattern."""

_deadline: ContextVar[float] = ContextVar("deadline")


class TooLong(Exception):
    """The check exceeded its time."""

    def __init__(self) -> None:
        super().__init__(f"that takes more than {SECONDS:g} s")


@contextmanager
def timed() -> Iterator[None]:
    """Set the deadline of checks in the block.

    Raises:
        TooLong: the check took longer.
    """
    token = _deadline.set(time.monotonic() + SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def bounded_validator(schema: Mapping[str, Any]) -> Any:
    """jsonschema's validator of a schema, for use within `timed`. Nothing that the schema refers to is fetched.

    Raises:
        jsonschema.SchemaError: an invalid schema.
        ValueError: a keyword whose patterns jsonschema searches without a deadline, or a pattern that is too long.
    """
    plain = _without_dialects(schema)
    _refuse_unbounded(plain)
    known = validator_for(schema)
    known.check_schema(schema)
    return _bounded(known)(plain, registry=Registry())


@cache
def _bounded(known: type[Validator]) -> Any:
    own: dict[str, Callable[..., Any]] = {
        "pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
    }  # fmt: skip
    keywords: Mapping[str, Callable[..., Any]] = {**known.VALIDATORS, **own}
    return extend(known, {name: _ticking(keyword) for name, keyword in keywords.items()})


def _ticking(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.monotonic() > _deadline.get():
            raise TooLong
        return keyword(validator, value, instance, schema)

    return check


def _found(pattern: str, text: str) -> bool:
    left = _deadline.get() - time.monotonic()
    if left <= 0:
        raise TooLong
    try:
        return regex.search(pattern, text, timeout=left) is not None
    except TimeoutError:
        raise TooLong from None


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
    """A hashable key of a JSON value: 1 equals 1.0, but not true."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _frozen(inner)) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(map(_frozen, value))
    return ("boolean", value) if isinstance(value, bool) else value


def _without_dialects(schema: Any) -> Any:
    """Remove `$schema`, because jsonschema would check parts that name a dialect with its own validators."""
    if isinstance(schema, Mapping):
        return {
            name: _without_dialects(inner) for name, inner in schema.items()
            if name != "$schema" or not isinstance(inner, str)
        }  # fmt: skip
    return [_without_dialects(inner) for inner in schema] if isinstance(schema, (list, tuple)) else schema


def _refuse_unbounded(schema: Any) -> None:
    patterns: list[str] = []
    unevaluated = by_pattern = False
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            unevaluated |= "unevaluatedProperties" in value
            inside = value.get("patternProperties")
            patterns += inside if isinstance(inside, Mapping) else ()
            patterns += [value["pattern"]] if isinstance(value.get("pattern"), str) else []
            by_pattern |= bool(inside)
            if unevaluated and by_pattern:
                raise ValueError("patternProperties beside unevaluatedProperties; give additionalProperties instead")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    for pattern in patterns:
        if len(pattern) > MOST_CHARACTERS or _written_out(pattern) > MOST_CHARACTERS:
            raise ValueError(f"the pattern {pattern[:80]!r} has, its repeats written out, more than "
                             f"{MOST_CHARACTERS:,} characters")  # fmt: skip


def _written_out(pattern: str) -> int:
    """Length of a pattern with each `{n}` expanded: `regex` allocates memory for it before it searches.

    >>> _written_out("[a-z]{2}-(a{10}){10}")
    103
    """
    sizes, last = [0], [0]  # sizes of open groups, and of the last item in each
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


_PARTS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?:\d*,)?(?P<most>\d+),?\}|.", re.DOTALL
)
"""Escapes, classes, repeats and single characters."""
