"""Charges for filters, methods and operators before they run: for what they scan, and for text that they may create."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import _PassArg
from markupsafe import Markup

from verbatim.models.renderers.metering.meter import Meter, Overrun

MAX_BITS = 10_000
"""Size of the largest integer that a template may compute with, in bits."""

_SHALLOW = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "first", "last", "length", "count",
                      "items", "reverse", "list", "default", "d", "random", "batch", "slice", "attr",
                      "copy"})  # fmt: skip
"""Filters and methods that iterate over the items of a list without scanning the items themselves."""
_TIMES = dict.fromkeys(("sort", "unique", "groupby", "min", "max", "dictsort", "pprint", "title", "wordwrap"), 16)
"""How many times some filters are assumed to scan a whole value."""
_QUADRATIC = frozenset({"striptags", "urlize", "sum"})
"""Filters that take time quadratic in their input."""
_AT_ONCE = frozenset({"sort", "unique", "groupby", "min", "max", "sum", "join"})
"""Filters that consume a whole generator. The generator is turned into a list first, so that its items can be
charged."""
_GROWING = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice", "round", "expandtabs",
                      "indent", "tojson", "replace", "wordwrap", "translate", "join", "split", "rsplit", "splitlines",
                      "list", "%", "format"})  # fmt: skip
"""Filters and methods whose result may be much larger than their input (`_growth`)."""
_LOOKING = frozenset({"in", "lower", "upper", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=",
                      "<", "lt", "lessthan", "<=", "le"})  # fmt: skip
"""Tests that scan a whole value."""
_PASSED = {_PassArg.eval_context: "eval_ctx", _PassArg.environment: "environment"}
_CODECS = frozenset({"utf-8", "utf-16", "utf-32", "ascii", "iso8859-1"})
"""The allowed codecs. Other codecs can take time quadratic in the length of a text."""
_ITEM = 16
"""The charge for an item of a list, in characters, in addition to its text."""
_PRIVATE = re.compile(r"[.\[]_")
_NUMBER = re.compile(r"\d+")


def metered_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that charges the budget before it runs."""
    passed = _PassArg.from_obj(call)

    def metered(context: Any, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.meter
        if name in _AT_ONCE and type(value) is GeneratorType:
            value = list(value)
        each = count(meter, name, value, [*args, *kwargs.values()])
        if passed is None:
            made = call(value, *args, **kwargs)
        else:
            first = context if passed is _PassArg.context else getattr(context, _PASSED[passed])
            made = call(first, value, *args, **kwargs)
        return meter.counted(made, each) if type(made) is GeneratorType else meter.made(made)

    return pass_context(metered)


def metered_test(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A test that charges the budget if it scans a whole value."""
    if name not in _LOOKING:
        return call

    def metered(context: Any, value: Any, /, *args: Any) -> Any:
        context.meter.look(value, *args)
        return call(value, *args)

    return pass_context(metered)


def count_operation(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Charge an operator before it can create a large value."""
    for value in (left, right):
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise Overrun("it does arithmetic on a number that is too large")
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_BITS:
            raise Overrun("it computes a huge number")
    elif operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, (str, bytes, list, tuple)) and isinstance(times, int):
                meter.make(max(times, 0) * len(repeated))
    elif operator == "%" and isinstance(left, (str, bytes)):
        count(meter, "%", left, right if isinstance(right, tuple) else [right])
    elif operator == "-":  # or a difference of two sets of dict keys, which scans both sets
        meter.look(left, right)


def call_method(environment: Any, meter: Meter, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of a string, a number, a list or a dict, after charging for it.

    Raises:
        SecurityError: a codec that is not allowed, or a format string that reads a private field.
    """
    of, name = method.__self__, method.__name__
    if type(of) is dict and name != "copy":
        meter.look(*args[:1])
        return method(*args, **kwargs)
    if name in ("format", "format_map"):
        return _format(environment, meter, method, args, kwargs)
    args = tuple(list(arg) if type(arg) is GeneratorType else arg for arg in args)
    values = [*args, *kwargs.values()]
    if name in ("encode", "decode"):
        for codec in values:
            if isinstance(codec, str) and codec in ("strict", "ignore", "replace"):
                continue
            if not isinstance(codec, str) or codecs.lookup(codec).name not in _CODECS:
                raise SecurityError(f"a chat template must not encode as {str(codec)[:40]!r}")
    count(meter, name, of, values)
    return meter.made(method(*args, **kwargs))


def _format(environment: Any, meter: Meter, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The result of `"...".format` or `format_map`, with each field charged."""
    pattern = method.__self__
    if method.__name__ == "format_map":
        (kwargs,), args = args, ()
    meter.write(pattern)
    formatter: Any = (
        _EscapeFormatter(environment, escape=pattern.escape) if isinstance(pattern, Markup) else _Formatter(environment)
    )
    formatter.meter = meter
    return type(pattern)(formatter.vformat(pattern, args, kwargs))  # type: ignore[no-any-return]


class _Formatter(SandboxedFormatter):
    meter: Meter

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Format one field. Its width is known only now, because another field may supply it."""
        self.meter.step(1)
        self.meter.make(_widths(format_spec))
        self.meter.write(value)
        return super().format_field(value, format_spec)

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Look up a field; private fields are refused."""
        if _PRIVATE.search(field_name):
            raise SecurityError(f"a chat template must not format {field_name[:80]!r}")
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Convert a field by `!r` or a similar conversion, which writes the whole value."""
        self.meter.write(value)
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


def count(meter: Meter, name: str, value: Any, values: Sequence[Any]) -> int:
    """Charge for what the filter or method with this name is about to do with `value` and its arguments.

    Returns:
        If the result is a generator: the steps to charge per item of the result.
    """
    times = _TIMES.get(name, 1)
    if values:
        times += sum(text.count(".") for text in values if isinstance(text, str))  # "a.b.c": one lookup per dot
        meter.look(*values)
    length = len(value) if hasattr(value, "__len__") else 1
    meter.step(1)
    if isinstance(value, (str, bytes)):
        meter.look(value, times=times)
    elif name in _SHALLOW:
        meter.step(length * times)
    else:
        meter.look(value, times=times)
        meter.write(value)
    if name in _QUADRATIC:
        meter.step(length * (1 + meter.size(value)[1]) >> 6)
    if name in _GROWING:
        meter.make(_growth(meter, name, value, values))
    return times


def _growth(meter: Meter, name: str, value: Any, values: Sequence[Any]) -> int:
    """Upper bound on the characters that a filter or method creates in addition to the characters of `value`."""
    texts = [text for text in values if isinstance(text, (str, bytes))]
    width = sum(map(len, texts)) + sum(abs(number) for number in values if isinstance(number, int))
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes" | "batch" | "slice":
            return width
        case "round":  # computes a power of ten with this exponent
            return width * width
        case "expandtabs" | "indent":
            return width * (2 + str(value).count("\n") + str(value).count("\t"))
        case "tojson":
            return width * _ITEM * meter.size(value)[0]
        case "replace":
            return sum(map(len, texts)) * sum(str(value).count(str(text)) for text in texts)
        case "wordwrap" | "translate":
            return len(str(value)) * meter.size(values)[1]
        case "join":  # a filter that is applied to the items, or a method of the separator
            between, items = (value, values) if isinstance(value, (str, bytes)) and values else ("", [value])
            return sum(map(len, [between, *texts])) * sum(len(part) for part in items if hasattr(part, "__len__"))
        case "split" | "rsplit" | "splitlines" | "list":
            return _ITEM * len(value) if isinstance(value, (str, bytes)) else 0
        case "%" | "format":
            pattern = value.decode("latin-1") if isinstance(value, bytes) else str(value)
            return _widths(pattern) + (width if "*" in pattern else 0) + pattern.count("%") * meter.size(values)[1]
    return 0


def _widths(text: str) -> int:
    """The sum of all numbers in a format string, because each number may be a width."""
    return sum(int(number) for number in _NUMBER.findall(text))
