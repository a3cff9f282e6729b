"""Counts the methods of JSON's types that a template may call, before they make something big."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError

from verbatim.renderers.metering.meter import Meter

_TEXT = frozenset({
    "capitalize", "casefold", "center", "count", "encode", "endswith", "expandtabs", "find", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
    "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
    "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "translate", "upper", "zfill", "striptags", "unescape",
})  # fmt: skip
_METHODS: Mapping[type, frozenset[str]] = {
    str: _TEXT,
    bytes: frozenset({"decode", "hex"}),
    int: frozenset({"bit_length", "bit_count", "conjugate", "is_integer"}),
    float: frozenset({"is_integer", "hex", "conjugate", "as_integer_ratio"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "fromkeys", "get", "items", "keys", "values"}),
    range: frozenset({"count", "index"}),
}
_QUICK = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "find", "removeprefix",
                    "removesuffix"})  # fmt: skip
_CODECS = frozenset({"utf-8", "utf-16", "utf-32", "ascii", "iso8859-1"})
"""Others can take time that grows with the square of a text."""
_ITEM = 32
"""Characters that an item of a list takes the room of, the half of them without a text."""


def call_method(meter: Meter, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of a text, a number, a list or a dict.

    Raises:
        SecurityError: one that templates have no use for.
        Overrun: the budget is spent.
    """
    of, name = method.__self__, method.__name__
    kind: Any = type(of)
    if kind not in _METHODS:
        kind = next((kind for kind in kind.__mro__ if kind in _METHODS), None)
    if kind is None or name not in _METHODS[kind]:
        raise SecurityError(f"a chat template must not call {type(of).__name__}.{name}")
    if kind is str and name in _QUICK and not kwargs and len(args) < 2 and all(type(arg) is str for arg in args):
        meter.look(of)
        return meter.made(method(*args))
    if any(type(arg) is GeneratorType for arg in args):
        args = tuple(meter.counted(arg) if type(arg) is GeneratorType else arg for arg in args)
    meter.step(1)
    if kind is dict and name != "fromkeys":
        if name == "copy":
            meter.step(len(of))
        meter.look(*args[:1])
        return method(*args, **kwargs)
    meter.look(*args, *kwargs.values())
    if kind is str:
        meter.look(of)
        growth = _GROWTH.get(name)
        if growth is not None:
            args = growth(meter, of, args, kwargs) or args
    elif kind in (list, tuple) and name != "copy":
        meter.look(of)
    return meter.made(method(*args, **kwargs))


def _width(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for width in args[:1]:
        if isinstance(width, int) and width > 0:
            meter.make(width)


def _tabs(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for width in (*args, *kwargs.values()):
        if isinstance(width, int) and width > 0:
            meter.make(of.count("\t") * width)


def _replaced(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        meter.make(len(of) + of.count(args[0]) * len(args[1]))


def _joined(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    if len(args) != 1:
        return None
    parts = args[0] if isinstance(args[0], (list, tuple, str)) else list(args[0])
    meter.write(parts)
    meter.make(len(of) * len(parts))
    return (parts,)


def _cut(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    separator = args[0] if args else kwargs.get("sep")
    most = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
    found = of.count(separator) if isinstance(separator, str) and separator else len(of) // 2
    if isinstance(most, int) and most >= 0:
        found = min(found, most)
    meter.make(_ITEM * found)


def _lines(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    meter.make(_ITEM * len(of) // 2)


def _translated(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if args and isinstance(args[0], dict):
        texts = (len(text) for text in args[0].values() if isinstance(text, str))
        meter.make(len(of) * max(texts, default=1))


def _coded(meter: Meter, of: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for name in (*args[:1], *(kwargs[key] for key in ("encoding",) if key in kwargs)):
        if isinstance(name, str) and codecs.lookup(name).name not in _CODECS:
            raise SecurityError(f"a chat template must not encode as {name[:40]!r}")


_Growth = Callable[[Meter, str, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...] | None]
_GROWTH: Mapping[str, _Growth] = {
    "center": _width, "ljust": _width, "rjust": _width, "zfill": _width, "expandtabs": _tabs, "replace": _replaced,
    "join": _joined, "split": _cut, "rsplit": _cut, "splitlines": _lines, "translate": _translated, "encode": _coded,
    "striptags": lambda meter, of, args, kwargs: meter.step((of.count("<") + 1) * len(of) >> 4),
}  # fmt: skip
