"""Counts the text that a template makes by formatting, where a placeholder can ask for any width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from verbatim.renderers.metering.meter import Meter, Overrun

_PRIVATE = re.compile(r"[.\[]_")
_NUMBER = re.compile(r"\d+")
_MOST_DIGITS = 9
_NARROW = 4
"""Digits of a width that need not be counted."""


def printf(meter: Meter, pattern: Any, values: Any) -> Any:
    """`pattern % values`.

    Any number in the pattern may be a width, and so may any value where a width is a star.
    """
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    _widths(meter, text)
    if "*" in text:
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, int):
                meter.make(abs(value))
    meter.write(values, text.count("%") + 1)
    return meter.made(pattern % values)


class FormatMethod:
    """`"...".format`, taken from a text and not called yet."""

    def __init__(self, pattern: str, is_map: bool) -> None:
        self._pattern = pattern
        self._is_map = is_map

    def apply(self, environment: Any, meter: Meter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What the sandbox makes of it, each field counted."""
        if self._is_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            kwargs, args = args[0], ()
        meter.step(len(self._pattern) + 10)
        meter.make(len(self._pattern))
        formatter: Any
        if isinstance(self._pattern, Markup):
            formatter = _EscapeFormatter(environment, escape=self._pattern.escape)
        else:
            formatter = _Metered(environment)
        formatter.meter = meter
        return type(self._pattern)(formatter.vformat(self._pattern, args, kwargs))


class _Metered(SandboxedFormatter):
    meter: Meter

    def format_field(self, value: Any, format_spec: str) -> Any:
        """One field; its width, which another field may have given, is known here."""
        _widths(self.meter, format_spec)
        self.meter.write(value)
        return self.meter.made(super().format_field(value, format_spec))

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """What a field names; never what is private."""
        if _PRIVATE.search(field_name):
            raise SecurityError(f"a chat template must not format {field_name[:80]!r}")
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """`!r` and the like write a value."""
        self.meter.write(value)
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Metered, SandboxedEscapeFormatter):
    pass


def _widths(meter: Meter, text: str) -> None:
    meter.step(len(text) >> 4)
    for number in _NUMBER.findall(text):
        if len(number) > _MOST_DIGITS:
            raise Overrun("it writes a field of any width")
        if len(number) > _NARROW:
            meter.make(int(number))
        else:
            meter.step(1 + (int(number) >> 4))
