"""Defines the syntaxes of tool calls and parses calls. A model's syntax is never guessed from its output.

`derived_syntax` finds it in the chat template. Four forms are known, which cover Hermes, Mistral and Llama JSON,
DeepSeek, the XML of Qwen, GLM and others, and LFM:

- `whole`: one JSON object with the name in it: `<tool_call>{"name": "look", "arguments": {"at": "Bonn"}}</tool_call>`
- `named`: the name, then the arguments as a JSON object: `<|begin|>look<|sep|>{"at": "Bonn"}<|end|>`
- `tagged`: the name, then each argument on its own: `<function=look><parameter=at>Bonn</parameter></function>`
- `python`: a list of calls with keywords: `<|begin|>[look(at="Bonn")]<|end|>`
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.renderers.responses import check_call, is_json, types_of, unreadable, word
from verbatim.types import ParseStatus, ToolCall

Form = Literal["whole", "named", "tagged", "python"]


@dataclass(frozen=True, kw_only=True)
class ToolSyntax:
    """The text around the parts of a call, stripped of white space at its ends.

    Example, GLM: opens `<tool_call>`, closes `</tool_call>`, key `<arg_key>`, value `</arg_key>\\n<arg_value>`, ends
    `</arg_value>`.
    """

    form: Form
    before: str
    """Before the first of several calls; may be empty."""
    opens: str
    """Before each call; empty in `whole` where a call is all there is."""
    closes: str
    """After each call."""
    listed: bool = False
    """In `whole`: several calls are one JSON list."""
    after_name: str = ""
    """Between name and arguments."""
    arguments: str = "arguments"
    """In `whole`: the key of the arguments."""
    key: str = ""
    """In `tagged`: before the key of an argument."""
    value: str = ""
    """In `tagged`: between key and value."""
    ends: str = ""
    """In `tagged`: after a value."""

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """The text beside the calls, and every attempted call in order; of a text as `hide` leaves it.

        Where arguments are written without quotes, the tools' schemas say which of them are texts.
        """
        if not self.opens:
            # A call is all there is, or it is none: an answer may be JSON too.
            call = self._bare(text)
            return ("", (call,)) if call is not None else (text, ())
        # An attempt begins with the first word, and the rest of what opens a call has to follow; but a word of prose
        # begins none, if the rest does not follow it.
        first, *rest = self.opens.split()
        begins, rest = (re.escape(first), rest) if _is_tag(first) else (rf"(?<!\w){_spaced(self.opens)}", [])
        content, *attempts = re.split(begins, text)
        calls: list[ToolCall] = []
        for attempt in attempts:
            body, closed, _ = _partition(attempt, self.closes) if self.closes else (attempt, True, "")
            before, opened, inside = _partition(body, " ".join(rest))
            if not closed:
                calls.append(unreadable(shown(body.strip()), "unclosed_block"))
            elif not opened or before.strip():
                calls.append(unreadable(shown(body.strip()), "malformed_structure"))
            else:
                calls += self._calls(inside, tools)
        if not calls:
            return text, ()
        return content.rstrip().removesuffix(self.before).rstrip(), tuple(calls)

    def _calls(self, body: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ToolCall]:
        if self.form == "python":
            return _python(body)
        if self.form != "whole":
            return [self._named(body) if self.form == "named" else self._tagged(body, tools)]
        raw = shown(body.strip())
        value = _json(raw)
        if self.listed and isinstance(value, list):
            return [self._whole(item, json.dumps(item) if is_json(item) else raw) for item in value]
        return [self._whole(value, raw)]

    def _whole(self, value: Any, raw: str) -> ToolCall:
        if value is _NOT_JSON:
            return unreadable(raw, "invalid_json")
        if not isinstance(value, dict):
            return unreadable(raw, "malformed_structure")
        if not value.get("name"):
            return unreadable(raw, "missing_name")
        return check_call(value["name"], value.get(self.arguments, {}), "ok", raw)

    def _bare(self, text: str) -> ToolCall | None:
        """Read a call without marks around it: JSON with a name and arguments, or the start of such; else an answer."""
        raw = shown(text.strip())
        value = _json(raw)
        if value is _NOT_JSON:
            begins = re.match(rf'\{{\s*"name"\s*:\s*"[^"]*"\s*,\s*"{re.escape(self.arguments)}"\s*:\s*\{{', raw)
            return unreadable(raw, "invalid_json") if begins else None
        named = isinstance(value, dict) and isinstance(value.get("name"), str)
        return self._whole(value, raw) if named and isinstance(value.get(self.arguments), dict) else None

    def _named(self, text: str) -> ToolCall:
        raw = shown(text.strip())
        name, found, rest = _partition(text, self.after_name) if self.after_name else _before_brace(text)
        if not name.strip():
            return unreadable(raw, "missing_name")
        value = _json(rest) if found else _NOT_JSON
        if value is _NOT_JSON:
            return unreadable(raw, "invalid_json")
        return check_call(shown(name.strip()), value, "ok", raw)

    def _tagged(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
        raw = shown(text.strip())
        head, *parts = text.split(self.key)
        name = shown(head.strip().removesuffix(self.after_name).strip())
        if not name:
            return unreadable(raw, "missing_name")
        arguments = dict[str, Any]()
        status: ParseStatus = "ok"
        for part in parts:
            key, found, rest = _partition(part, self.value)
            value, ended, _ = rest.rpartition(self.ends)
            if not found or not ended:
                return unreadable(raw, "malformed_structure")
            key = shown(key.strip())
            argument = _typed(shown(value.removeprefix("\n").removesuffix("\n")), types_of(tools, name, key))
            status = "invalid_json" if argument is _NOT_JSON else status
            arguments[key] = argument
        return check_call(name, arguments, status, raw)


_HIDDEN = "\ufdd5"


def hide(text: str, tokens: re.Pattern[str]) -> str:
    """Sampled text in which what only looks like a control token is not found as one; `shown` undoes it."""
    return tokens.sub(lambda found: found[0][0] + _HIDDEN + found[0][1:], text)


def shown(text: str) -> str:
    """Undo `hide`: the text as it was sampled."""
    return text.replace(_HIDDEN, "")


def _is_tag(word: str) -> bool:
    """Whether a word is a marker: it has a character that plain sentences do not have."""
    return any(not (c.isalnum() or c in ".,:;!?'\"()-") for c in word)


def _spaced(words: str) -> str:
    """The pattern of these words, however they are spaced."""
    return r"\s*".join(map(re.escape, words.split()))


def _partition(text: str, words: str) -> tuple[str, bool, str]:
    """The text before and after these words, however they are spaced; no words are found at once."""
    found = re.search(_spaced(words), text)
    return (text[: found.start()], True, text[found.end() :]) if found else (text, False, "")


def _typed(text: str, types: frozenset[str]) -> Any:
    """An argument written without quotes: a text where it may be one, or else JSON or a template's word for it.

    Where nothing is declared, what is no JSON is a text; where something else is, it is none: `_NOT_JSON`.
    """
    is_word, meant = word(text, types)
    if "string" in types or is_word:
        return text if "string" in types else meant
    value = _json(text)
    return text if isinstance(value, str) or (value is _NOT_JSON and not types) else value


def _python(text: str) -> Sequence[ToolCall]:
    """Calls written as Python: read as a syntax tree, never run."""
    raw = shown(text.strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would quote odd escapes of the model's text on the console
            tree = ast.parse(raw, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [unreadable(raw, "invalid_json")]
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            calls.append(unreadable(raw, "malformed_structure"))
            continue
        try:
            arguments = _object((keyword.arg, keyword.value) for keyword in node.keywords)
            calls.append(check_call(node.func.id, arguments, "ok", raw))
        except (ValueError, RecursionError):
            calls.append(unreadable(raw, "malformed_structure"))
    return calls


def _object(items: Iterable[tuple[object, ast.expr]]) -> dict[str, Any]:
    """A JSON object of keys and of values that are Python.

    Raises:
        ValueError: a key that is no text (`**` has none) or is there twice, or a value that is not JSON.
    """
    values: dict[str, Any] = {}
    for key, value in items:
        if not isinstance(key, str) or key in values:
            raise ValueError(key)
        values[key] = _literal(value)
    return values


def _literal(node: ast.expr) -> Any:
    """A JSON value, written in Python or in JSON."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _object((getattr(key, "value", None), value) for key, value in zip(keys, values, strict=True))
    raise ValueError(type(node).__name__)


_CONSTANTS = {"true": True, "false": False, "null": None}


def _before_brace(text: str) -> tuple[str, bool, str]:
    name, brace, rest = text.partition("{")
    return name, bool(brace), brace + rest


_NOT_JSON = object()


def _json(text: str) -> Any:
    try:
        return json.loads(shown(text))
    except (ValueError, RecursionError):
        return _NOT_JSON
