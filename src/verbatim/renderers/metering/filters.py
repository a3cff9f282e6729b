"""Counts the filters and tests of a template; defines those that compiled templates count with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any

from jinja2 import pass_context
from jinja2.utils import _PassArg

from verbatim.renderers.metering.formats import printf
from verbatim.renderers.metering.meter import Meter, Overrun
from verbatim.renderers.metering.operations import compare, join

ROUNDS, SPEND, JOINED, COMPARED, SIZED, KEY = (f"verbatim {name}" for name in (
    "rounds", "spend", "joined", "compared", "sized", "key"))  # fmt: skip

_LAZY = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "first", "last", "length", "count", "items",
                   "reverse", "list", "default", "d", "random", "batch", "slice", "attr"})  # fmt: skip
"""They look at the items of a list, and not into them."""
_SORTING = frozenset({"sort", "unique", "groupby", "min", "max", "dictsort", "pprint", "title", "wordwrap"})
_SORTED = 16
"""How often something is looked at that is sorted."""
_QUADRATIC = frozenset({"striptags", "urlize", "sum"})
_PASSED = {_PassArg.eval_context: "eval_ctx", _PassArg.environment: "environment"}
_MOST_DIGITS = 1_000
_NARROW = 16


def metered_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is counted before it runs."""
    passed = _PassArg.from_obj(call)
    growth = _GROWTH.get(name)
    times = _SORTED if name in _SORTING else 1
    lazy, quadratic = name in _LAZY, name in _QUADRATIC

    def metered(context: Any, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.meter
        meter.step(1)
        if type(value) is GeneratorType:
            value = meter.counted(value)
        elif lazy:
            if type(value) is not str and hasattr(value, "__len__"):
                meter.step(len(value))
        else:
            meter.look(value, times=times)
        if args or kwargs:
            if any(type(arg) is GeneratorType for arg in args):
                args = tuple(meter.counted(arg) if type(arg) is GeneratorType else arg for arg in args)
            meter.look(*args, *kwargs.values())
            if "attribute" in kwargs:  # looked up in every item, part by part
                meter.look(value, times=1 + str(kwargs["attribute"]).count("."))
        if quadratic:
            value = _whole(value)
            meter.step((len(value) if hasattr(value, "__len__") else 1) * (1 + meter.length(value)) >> 6)
        if growth is not None:
            value = growth(meter, value, *args, **kwargs)
        if passed is None:
            return meter.made(call(value, *args, **kwargs))
        first = context if passed is _PassArg.context else getattr(context, _PASSED[passed])
        return meter.made(call(first, value, *args, **kwargs))

    return pass_context(metered)


def metered_test(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A test that is counted where it looks at all of a value."""
    if name not in _LOOKING:
        return call

    def metered(context: Any, value: Any, /, *args: Any) -> Any:
        context.meter.look(value, *args)
        return call(value, *args)

    return pass_context(metered)


_LOOKING = frozenset({"in", "lower", "upper", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=",
                      "<", "lt", "lessthan", "<=", "le"})  # fmt: skip


def _whole(value: Any) -> Any:
    return list(value) if type(value) is GeneratorType else value


def _written(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    meter.write(value)
    return value


def _wide(meter: Meter, value: Any, width: Any = 80, *args: Any, **kwargs: Any) -> Any:
    meter.write(value)
    if isinstance(width, int) and width > 0:
        meter.make(width)
    return value


def _replaced(meter: Meter, value: Any, old: Any = "", new: Any = "", *args: Any, **kwargs: Any) -> Any:
    meter.write(value)
    meter.make(str(value).count(str(old)) * len(str(new)))
    return value


def _indented(meter: Meter, value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> Any:
    wide = width if isinstance(width, int) else len(str(width))
    meter.make((str(value).count("\n") + 2) * max(wide, 0))
    return value


def _wrapped(
    meter: Meter, value: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = "\n", *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    meter.make(len(str(value)) * (1 + len(str(wrapstring or ""))))
    return value


def _filled(meter: Meter, value: Any, number: Any = 0, *args: Any, **kwargs: Any) -> Any:
    if isinstance(number, int):
        meter.step(abs(number))
    return value


def _rounded(meter: Meter, value: Any, precision: Any = 0, *args: Any, **kwargs: Any) -> Any:
    if isinstance(precision, int) and abs(precision) > _MOST_DIGITS:
        raise Overrun("it computes a huge number")
    return value


def _joined(meter: Meter, value: Any, d: Any = "", *args: Any, **kwargs: Any) -> Any:
    value = _whole(value)
    meter.write(value)
    meter.make(len(str(d)) * (len(value) if hasattr(value, "__len__") else 1))
    return value


def _listed(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, (str, bytes)):
        meter.make(_NARROW * len(value))
    return value


def _as_json(meter: Meter, value: Any, ensure_ascii: Any = False, indent: Any = None, *args: Any, **kwargs: Any) -> Any:
    meter.write(value)
    wide = indent if isinstance(indent, int) else len(indent) if isinstance(indent, str) else 0
    separators = args[0] if args else kwargs.get("separators")
    if isinstance(separators, (list, tuple)):
        wide += sum(len(part) for part in separators if isinstance(part, str))
    if wide > _NARROW:
        meter.write(value, wide)
    return value


_Growth = Callable[..., Any]
_GROWTH: Mapping[str, _Growth] = {
    "center": _wide, "indent": _indented, "replace": _replaced, "wordwrap": _wrapped, "batch": _filled,
    "slice": _filled, "round": _rounded, "join": _joined, "tojson": _as_json, "list": _listed, "string": _written,
    "pprint": _written, "e": _written, "escape": _written, "forceescape": _written, "urlencode": _written,
    "xmlattr": _written, "safe": _written, "upper": _written, "lower": _written, "trim": _written,
    "capitalize": _written, "truncate": _written, "urlize": _written,
}  # fmt: skip


@pass_context
def _format(context: Any, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The filter `format`."""
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    return printf(context.meter, value if isinstance(value, str) else str(value), kwargs or args)


def _refuse_income(steps: int, characters: int) -> None:
    if steps < 0 or characters < 0:  # a template can find these filters by their names
        raise Overrun("it takes more than it may spend")


@pass_context
def _rounds(context: Any, items: Any, steps: int = 1, characters: int = 0) -> Any:
    _refuse_income(steps, characters)
    return context.meter.counted(items, steps, characters)


@pass_context
def _spend(context: Any, value: Any, steps: int = 1, characters: int = 0) -> Any:
    _refuse_income(steps, characters)
    context.meter.step(steps)
    context.meter.make(characters)
    return value


@pass_context
def _join_all(context: Any, parts: Any) -> str:
    return join(context.meter, parts, context.eval_ctx.autoescape)


@pass_context
def _compared(context: Any, left: Any, *others: Any) -> Any:
    """`left`, then operators and operands in turn: a chain is true if each comparison is."""
    result: Any = True
    for name, right in zip(others[::2], others[1::2], strict=True):
        result = compare(context.meter, name, left, right)
        if not result:
            return result
        left = right
    return result


@pass_context
def _sized(context: Any, value: Any) -> Any:
    return context.meter.made(value)


@pass_context
def _key(context: Any, value: Any) -> Any:
    context.meter.look(value)
    return value


FILTERS: Mapping[str, Callable[..., Any]] = {
    "format": _format, ROUNDS: _rounds, SPEND: _spend, JOINED: _join_all, COMPARED: _compared, SIZED: _sized,
    KEY: _key,
}  # fmt: skip
