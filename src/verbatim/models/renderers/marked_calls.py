"""Reads calls in which texts stand between marks and keys without quotes, as Gemma 4 writes them:

    look{at:<|"|>Bonn<|"|>,days:[1,2],deep:{warm:true}}

A text may hold anything: in sampled ids the mark is a token, and what only looks like one is a text. A key cannot hold
what ends it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.models.renderers.nesting import MAX_DEPTH
from verbatim.models.renderers.responses import check_call, unreadable
from verbatim.models.renderers.sampled_text import shown

_NAME = re.compile(r"""[^\s<>"'={}]+""")
_KEY = re.compile(r"[^\s:,{}\[\]](?:[^:,{}\[\]]*[^\s:,{}\[\]])?(?=:)")
_LITERAL = re.compile(r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=[,}\]])")


def marked_call(text: str, mark: str) -> ToolCall:
    """The call of which this is all the text.

    Args:
        text: Between the marks of the call, as `sampled_text.hide` leaves it.
        mark: Before and behind a text.
    """
    raw = shown(text.strip())
    name, brace, _ = text.partition("{")
    if not name:
        return unreadable(raw, "missing_name")
    try:
        arguments, end = _Reader(text, mark).value(len(name))
    except (ValueError, RecursionError):
        return unreadable(raw, "malformed_structure")
    if not brace or end != len(text) or _NAME.fullmatch(name) is None:
        return unreadable(raw, "malformed_structure")
    return check_call(shown(name), arguments, "ok", raw)


class _Reader:
    """Reads the values of one text; a ValueError where there is none."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark = text, mark

    def value(self, start: int, depth: int = 0) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self._text.startswith(self._mark, start):
            start += len(self._mark)
            end = self._text.index(self._mark, start)
            return shown(self._text[start:end]), end + len(self._mark)
        opened = self._text[start : start + 1]
        if opened == "{":
            return self._object(start + 1, depth)
        if opened == "[":
            return self._list(start + 1, depth)
        literal = _LITERAL.match(self._text, start)
        if literal is None:
            raise ValueError("no value")
        return json.loads(literal[0]), literal.end()

    def _object(self, place: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        if self._text.startswith("}", place):
            return found, place + 1
        while True:
            key = _KEY.match(self._text, place)
            if key is None or self._mark in key[0] or shown(key[0]) in found:
                raise ValueError("no key, or one that is there twice")
            found[shown(key[0])], place = self.value(key.end() + 1, depth + 1)
            is_last, place = self._is_last(place, "}")
            if is_last:
                return found, place

    def _list(self, place: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        if self._text.startswith("]", place):
            return found, place + 1
        while True:
            value, place = self.value(place, depth + 1)
            found.append(value)
            is_last, place = self._is_last(place, "]")
            if is_last:
                return found, place

    def _is_last(self, place: int, closes: str) -> tuple[bool, int]:
        """Whether an object or a list ends at a place, and the place behind what stands there."""
        behind = self._text[place : place + 1]
        if behind not in (",", closes) or not behind:
            raise ValueError("no end")
        return behind == closes, place + 1
