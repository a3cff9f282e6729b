"""Reads calls that are written as Python, `[look(at="Bonn")]`: as a syntax tree, never run."""

from __future__ import annotations

import ast
import dataclasses
import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.models.renderers.raw_texts import escaped
from verbatim.models.renderers.responses import check_call, unreadable

_CONSTANTS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"""[^\s<>"'=()\[\]{},]+""")
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'" r'|"(?:[^"\\]|\\.)*"')
"""One text on one line, without a prefix."""
_MASK = "zqname_"
_KEYWORD = re.compile(rf"{_LITERAL.pattern}|(?<!\w)({'|'.join(keyword.kwlist)})(?=\s*(?:\(|=(?!=)))")
"""A text, or a word of Python's own that stands where the name of a tool or of a parameter does: `from="Bonn"`."""
_UNKNOWN = re.compile(r"(?<!\\)(?:\\\\)*\\[^\\'\"abfnrtvxuUN0-7]")
"""An escape that Python does not know; it would keep the backslash."""


def python_calls(
    raw: str, quote: str = "", known: Callable[[str], frozenset[str]] = lambda _: frozenset()
) -> Sequence[ToolCall]:
    """Every call of a list of calls, or of one call.

    Args:
        raw: The text between the marks.
        quote: What stands around texts that the format writes as they are; empty where it escapes them. Where it does
            not, and does not write this text either, one with a backslash may mean two things: its call is unreadable.
        known: The parameters of a tool; empty where they are not known.
    """
    as_python = escaped(raw, quote, known) if quote else None
    if as_python is not None:
        return [dataclasses.replace(call, raw=raw) for call in _calls(as_python, escapes=True)]
    return _calls(raw, escapes=not quote)


def _calls(raw: str, *, escapes: bool) -> Sequence[ToolCall]:
    source = _KEYWORD.sub(lambda found: f"{_MASK}{found[0]}" if found[1] else found[0], raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would quote odd escapes of the model's text on the console
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [unreadable(raw, "invalid_json")]
    if "#" in _LITERAL.sub("", raw):  # a comment is no part of a call
        return [unreadable(raw, "malformed_structure")]
    reader = _Reader(source, escapes)
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        try:
            name, keywords = reader.call(node)
            calls.append(check_call(name, reader.items(keywords), "ok", raw))
        except (ValueError, RecursionError):
            calls.append(unreadable(raw, "malformed_structure"))
    return calls


class _Reader:
    """Reads the values of one text."""

    def __init__(self, source: str, escapes: bool) -> None:
        self._lines, self._escapes = source.encode("utf-8", "surrogatepass").splitlines(), escapes

    def call(self, node: ast.expr) -> tuple[str, Iterator[tuple[str | None, ast.expr]]]:
        """The name and the keywords of a call.

        The name is the text before the bracket: models write `files.read(...)` and `get-weather(...)` too, and Python
        would read letters of other forms as plain ones.

        Raises:
            ValueError: it is no call, or has arguments without a name.
        """
        call = node.right if isinstance(node, ast.BinOp) else node
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(type(node).__name__)
        name = self._between(node, call.func).removeprefix(_MASK)
        if _NAME.fullmatch(name) is None:
            raise ValueError(name)
        return name, ((self._key(given), given.value) for given in call.keywords)

    def _key(self, given: ast.keyword) -> str | None:
        """Its name, if that is as it was sampled; None for `**`."""
        written = self._lines[given.lineno - 1][given.col_offset :].decode("utf-8", "surrogatepass")
        return given.arg.removeprefix(_MASK) if given.arg and written.startswith(given.arg) else None

    def items(self, items: Iterable[tuple[object, ast.expr]]) -> dict[str, Any]:
        """A JSON object of keys and of values that are Python.

        Raises:
            ValueError: a key that is no text (`**` has none) or is there twice, or a value that is not JSON.
        """
        values: dict[str, Any] = {}
        for key, value in items:
            if not isinstance(key, str) or key in values:
                raise ValueError(key)
            values[key] = self._value(value)
        return values

    def _value(self, node: ast.expr) -> Any:
        """A JSON value, written in Python or in JSON."""
        match node:
            case ast.Name(id=name) if name in _CONSTANTS and self._written(node) == name:
                return _CONSTANTS[name]
            case ast.Constant(value=str()):
                return self._text(node)
            case ast.Constant(value=bool() | None as value):
                return value
            case ast.Constant(value=int() | float()):
                return self._number(node)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
                return -self._number(number)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                texts = (self._text(key) if isinstance(key, ast.Constant) else None for key in keys)
                return self.items(zip(texts, values, strict=True))
        raise ValueError(type(node).__name__)

    def _text(self, node: ast.Constant) -> str | None:
        """A text: what JSON and Python write alike, and what only one of them knows; None for another constant.

        Raises:
            ValueError: it has a prefix, goes over several lines, is several side by side, or has a backslash of unknown
                meaning.
        """
        if not isinstance(node.value, str):
            return None
        written = self._written(node)
        if _LITERAL.fullmatch(written) is None or ("\\" in written and not self._escapes):
            raise ValueError(written)
        try:
            # JSON has escapes that Python lacks: "\/", and two halves of a character.
            return str(json.loads(written))
        except ValueError:
            if _UNKNOWN.search(written):
                raise
            return node.value

    def _number(self, node: ast.Constant) -> Any:
        """A number as JSON writes it: Python knows 0x10, 1_000 and 00 too, which no format writes.

        Raises:
            ValueError: it is another one.
        """
        return json.loads(self._written(node))

    def _written(self, node: ast.expr) -> str:
        """The text of an expression; nothing of one that goes over several lines."""
        return self._between(node, node)

    def _between(self, first: ast.expr, last: ast.expr) -> str:
        """The text from the start of one node to the end of another; nothing where it goes over several lines."""
        line = self._lines[first.lineno - 1] if first.lineno == last.end_lineno else b""
        return line[first.col_offset : last.end_col_offset].decode("utf-8", "surrogatepass")
