"""Counts the operators of a template before they make something big."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any

from jinja2.runtime import markup_join, str_join

from verbatim.renderers.metering.formats import printf
from verbatim.renderers.metering.meter import Meter, Overrun

MAX_BITS = 10_000
"""Bits of the largest integer that a template may compute."""

_PLENTY = 1 << 60
"""Smaller numbers are added without a look."""

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge, "in": lambda left, right: left in right, "notin": lambda left, right: left not in right,
}  # fmt: skip
"""By the names that Jinja's tree has for them."""


def add(meter: Meter, left: Any, right: Any) -> Any:
    """`+`."""
    if type(left) is int and type(right) is int and left < _PLENTY > right:
        return left + right
    if isinstance(left, str) and isinstance(right, str):
        meter.make(len(left) + len(right))
    elif isinstance(left, (list, tuple, bytes)):
        meter.step(len(left) + (len(right) if isinstance(right, (list, tuple, bytes)) else 0))
    else:
        _bits(left, right)
    return left + right


def multiply(meter: Meter, left: Any, right: Any) -> Any:
    """`*`."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise Overrun("it computes a huge number")
        return left * right
    repeated, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int) and times > 0:
        if isinstance(repeated, (str, bytes)):
            meter.make(len(repeated) * times)
        elif isinstance(repeated, (list, tuple)):
            meter.step(len(repeated) * times)
    return left * right


def power(meter: Meter, left: Any, right: Any) -> Any:
    """`**`."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise Overrun("it computes a huge number")
    return left**right


def modulo(meter: Meter, left: Any, right: Any) -> Any:
    """`%`, of numbers or of a printf-style format."""
    if isinstance(left, (str, bytes)):
        return printf(meter, left, right)
    _bits(left, right)
    return left % right


def subtract(meter: Meter, left: Any, right: Any) -> Any:
    """`-`, also of the keys of dicts."""
    if type(left) is int and type(right) is int and left < _PLENTY > right:
        return left - right
    if not isinstance(left, (int, float)):
        meter.look(left, right)
    _bits(left, right)
    return left - right


def divide(meter: Meter, left: Any, right: Any) -> Any:
    """`/`."""
    _bits(left, right)
    return left / right


def divide_whole(meter: Meter, left: Any, right: Any) -> Any:
    """`//`."""
    _bits(left, right)
    return left // right


BINARY: Mapping[str, Callable[[Meter, Any, Any], Any]] = {
    "+": add, "-": subtract, "*": multiply, "/": divide, "//": divide_whole, "%": modulo, "**": power,
}  # fmt: skip
OPERATORS = tuple(BINARY)


def compare(meter: Meter, name: str, left: Any, right: Any) -> Any:
    """One comparison."""
    if name in ("in", "notin"):
        if type(right) is GeneratorType:
            right = meter.counted(right)
        elif type(right) is dict:
            meter.look(left)
        else:
            meter.look(left, right)
    elif type(left) is not int and type(right) is not int:
        meter.look(left, right)
    return COMPARISONS[name](left, right)


def join(meter: Meter, parts: Sequence[Any], autoescape: bool) -> str:
    """`~`, as Jinja joins."""
    for part in parts:
        meter.write(part)
    return markup_join(parts) if autoescape else str_join(parts)


def _bits(left: Any, right: Any) -> None:
    for value in (left, right):
        if type(value) is int and value.bit_length() > MAX_BITS:
            raise Overrun("it computes with a huge number")
