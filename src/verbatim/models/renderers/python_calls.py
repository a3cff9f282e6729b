"""Parses calls written as Python, `[look(at="Bonn")]`, through Python's syntax tree. Nothing is executed."""

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
"""One string literal on one line, without a prefix."""
_MASK = "zqname_"
_KEYWORD = re.compile(rf"{_LITERAL.pattern}|(?<!\w)({'|'.join(keyword.kwlist)})(?=\s*(?:\(|=(?!=)))")
"""A string literal, or a Python keyword used as the name of a tool or parameter: `from="Bonn"`."""
_UNKNOWN = re.compile(r"(?<!\\)(?:\\\\)*\\[^\\'\"abfnrtvxuUN0-7]")
"""An escape that Python does not define. Python would keep its backslash in the string."""


def python_calls(
    raw: str, quote: str = "", known: Callable[[str], frozenset[str]] = lambda _: frozenset()
) -> Sequence[ToolCall]:
    """Parse a list of calls, or a single call.

    Args:
        raw: The text between the marks.
        quote: The quote around strings if the format writes them unescaped; "" if it escapes them. If `raw` is not what
            a format without escapes would have written, a string with a backslash is ambiguous, and its call is
            unreadable.
        known: Maps a tool's name to its parameters, or to an empty set if they are not known.
    """
    as_python = escaped(raw, quote, known) if quote else None
    if as_python is not None:
        return [dataclasses.replace(call, raw=raw) for call in _calls(as_python, escapes=True)]
    return _calls(raw, escapes=not quote)


def _calls(raw: str, *, escapes: bool) -> Sequence[ToolCall]:
    source = _KEYWORD.sub(lambda found: f"{_MASK}{found[0]}" if found[1] else found[0], raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # otherwise Python would print warnings about escapes in the model's text
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [unreadable(raw, "invalid_json")]
    if "#" in _LITERAL.sub("", raw):  # a comment is not a part of a call
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
    """Converts the syntax tree of one source text to names and values."""

    def __init__(self, source: str, escapes: bool) -> None:
        self._lines, self._escapes = source.encode("utf-8", "surrogatepass").splitlines(), escapes

    def call(self, node: ast.expr) -> tuple[str, Iterator[tuple[str | None, ast.expr]]]:
        """The name and the keyword arguments of a call.

        The name is taken from the source text before the parenthesis, not from the tree, because models also write
        `files.read(...)` and `get-weather(...)`, and because Python normalises Unicode letters in identifiers.

        Raises:
            ValueError: the node is not a call, or has positional arguments.
        """
        call = node.right if isinstance(node, ast.BinOp) else node
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(type(node).__name__)
        name = self._between(node, call.func).removeprefix(_MASK)
        if _NAME.fullmatch(name) is None:
            raise ValueError(name)
        return name, ((self._key(given), given.value) for given in call.keywords)

    def _key(self, given: ast.keyword) -> str | None:
        """The name of a keyword argument; None for `**`, or if Python's name differs from the sampled name."""
        written = self._lines[given.lineno - 1][given.col_offset :].decode("utf-8", "surrogatepass")
        return given.arg.removeprefix(_MASK) if given.arg and written.startswith(given.arg) else None

    def items(self, items: Iterable[tuple[object, ast.expr]]) -> dict[str, Any]:
        """A JSON object from keys and syntax trees of values.

        Raises:
            ValueError: a key is not a string (`**` has no key) or appears twice, or a value is not JSON.
        """
        values: dict[str, Any] = {}
        for key, value in items:
            if not isinstance(key, str) or key in values:
                raise ValueError(key)
            values[key] = self._value(value)
        return values

    def _value(self, node: ast.expr) -> Any:
        """A JSON value, written in Python's or JSON's notation."""
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
        """The value of a string literal in Python's or JSON's notation; None for a constant that is not a string.

        Raises:
            ValueError: the literal has a prefix, spans several lines, consists of several adjacent literals, or has a
                backslash whose meaning is unknown.
        """
        if not isinstance(node.value, str):
            return None
        written = self._written(node)
        if _LITERAL.fullmatch(written) is None or ("\\" in written and not self._escapes):
            raise ValueError(written)
        try:
            # Tried first, because JSON has escapes that Python lacks: "\/", and surrogate pairs.
            return str(json.loads(written))
        except ValueError:
            if _UNKNOWN.search(written):
                raise
            return node.value

    def _number(self, node: ast.Constant) -> Any:
        """A number in JSON's notation. Python also accepts 0x10, 1_000 and 00, which no format writes.

        Raises:
            ValueError: the number is not in JSON's notation.
        """
        return json.loads(self._written(node))

    def _written(self, node: ast.expr) -> str:
        """The source text of an expression; "" if it spans several lines."""
        return self._between(node, node)

    def _between(self, first: ast.expr, last: ast.expr) -> str:
        """The source text from the start of one node to the end of another; "" if it spans several lines."""
        line = self._lines[first.lineno - 1] if first.lineno == last.end_lineno else b""
        return line[first.col_offset : last.end_col_offset].decode("utf-8", "surrogatepass")
