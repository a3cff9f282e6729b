"""How a model writes tool calls, and how they are read; which syntax a model has is never guessed from its output.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.renderers.responses import check_call, unreadable
from verbatim.types import ToolCall

Form = Literal["whole", "named", "tagged", "python"]


@dataclass(frozen=True, kw_only=True)
class ToolSyntax:
    """What stands around the parts of a call, spaces at its ends left out.

    Example, GLM: opens `<tool_call>`, closes `</tool_call>`, key `<arg_key>`, value `</arg_key>\\n<arg_value>`, ends
    `</arg_value>`.
    """

    form: Form
    before: str
    """Before the first of several calls; empty where nothing is."""
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
            call = self._whole(text)
            return ("", (call,)) if call.status == "ok" or _BARE.match(text) else (text, ())
        # An attempt begins with the first word; the rest of what opens a call has to follow.
        word, *rest = self.opens.split()
        content, *attempts = text.split(word)
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
        value = _json(body) if self.listed else None
        return [self._whole(json.dumps(item)) for item in value] if isinstance(value, list) else [self._whole(body)]

    def _whole(self, text: str) -> ToolCall:
        raw = shown(text.strip())
        value = _json(raw)
        if value is _NOT_JSON:
            return unreadable(raw, "invalid_json")
        if not isinstance(value, dict):
            return unreadable(raw, "malformed_structure")
        if not value.get("name"):
            return unreadable(raw, "missing_name")
        return check_call(value["name"], value.get(self.arguments, {}), "ok", raw)

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
        texts, arguments = _text_parameters(name, tools), dict[str, Any]()
        for part in parts:
            key, found, rest = _partition(part, self.value)
            value, ended, _ = rest.rpartition(self.ends)
            if not found or not ended:
                return unreadable(raw, "malformed_structure")
            key, read = shown(key.strip()), _json(value)
            is_text = key in texts or read is _NOT_JSON or isinstance(read, str)
            arguments[key] = shown(value.removeprefix("\n").removesuffix("\n")) if is_text else read
        return check_call(name, arguments, "ok", raw)


_BARE = re.compile(r'\s*\{\s*"name"\s*:')
_HIDDEN = "\ufdd5"


def hide(text: str, tokens: re.Pattern[str]) -> str:
    """Sampled text in which what only looks like a control token is not found as one; `shown` undoes it."""
    return tokens.sub(lambda found: found[0][0] + _HIDDEN + found[0][1:], text)


def shown(text: str) -> str:
    """The text as it was sampled."""
    return text.replace(_HIDDEN, "")


def _partition(text: str, words: str) -> tuple[str, bool, str]:
    """The text before and after these words, however they are spaced; no words are found at once."""
    found = re.search(r"\s*".join(map(re.escape, words.split())), text)
    return (text[: found.start()], True, text[found.end() :]) if found else (text, False, "")


def _text_parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The parameters of a tool that are texts, whatever stands in them."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            schemas = {key: schema for key, schema in properties.items() if isinstance(schema, Mapping)}
            return frozenset(key for key, schema in schemas.items() if schema.get("type") == "string")
    return frozenset()


def _python(text: str) -> Sequence[ToolCall]:
    """Calls written as Python: read as a syntax tree, never run."""
    raw = shown(text.strip())
    try:
        tree = ast.parse(raw, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [unreadable(raw, "invalid_json")]
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            calls.append(unreadable(raw, "malformed_structure"))
            continue
        try:
            arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
            calls.append(check_call(node.func.id, arguments, "ok", raw))
        except (ValueError, RecursionError):
            calls.append(unreadable(raw, "malformed_structure"))
    return calls


def _literal(node: ast.expr) -> Any:
    """A value written in Python or in JSON."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


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
