"""Finds the syntax of a model's tool calls by rendering calls with its chat template.

The template is given calls with known names and arguments, and what stands around those is the syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.errors import EnvironmentFault
from verbatim.renderers.tool_syntax import ToolSyntax

Render = Callable[[list[dict[str, Any]], bool], str]
"""(messages, add_generation_prompt) -> text"""

_NAMES = ("zqfirst", "zqother")
_KEYS = ("zqone", "zqtwo")
_VALUES = ("zqalpha", "zqbeta")
_CONTENT = "zqcontent"
_LONGEST = 50_000
"""The longest rendering of two calls that is searched, in characters."""


def derive(render: Render, stops: Sequence[str]) -> ToolSyntax | None:
    """The syntax in which a template writes tool calls; None if it writes no calls, or none in a known form.

    `stops` are the tokens that end a turn; they are not part of a call.
    """
    single = _written(render, [_call(0)], stops)
    if single is None:
        return None
    double = _written(render, [_call(0), _call(1)], stops) or ""
    for form in (_derive_whole, _derive_named, _derive_tagged, _derive_python):
        syntax = form(single, double)
        if syntax is not None:
            return syntax if syntax.opens or syntax.form == "whole" else None
    return None


def _call(number: int) -> dict[str, Any]:
    function = {"name": _NAMES[number], "arguments": dict(zip(_KEYS, _VALUES, strict=True))}
    return {"id": f"zqcall00{number}", "type": "function", "function": function}


def _written(render: Render, calls: list[dict[str, Any]], stops: Sequence[str]) -> str | None:
    """The text that every rendering of these calls has, with and without content; None if the calls are not written."""
    texts = []
    for content in (_CONTENT, "", None):
        ask = {"role": "user", "content": "zqquestion"}
        reply = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            whole, start = render([ask, reply], False), render([ask], True)
        except EnvironmentFault:
            continue
        if len(whole) <= _LONGEST and all(call["function"]["name"] in whole for call in calls):
            text = whole[len(_shared_start(whole, start)) :]
            text = text.partition(_CONTENT)[2] if _CONTENT in text.partition(_NAMES[0])[0] else text
            last = max(text.rfind(mark) for mark in (*_NAMES, *_VALUES))
            ends = [text.find(stop, last) for stop in stops if text.find(stop, last) >= 0]
            texts.append(text[: min(ends, default=len(text))])
    return _shared_end(texts[0], texts[-1]) if texts else None


def _derive_whole(single: str, double: str) -> ToolSyntax | None:
    def is_call(value: Mapping[str, Any]) -> bool:
        return value.get("name") in _NAMES

    found = _object(single, is_call)
    key = next((key for key in ("arguments", "parameters") if found and found[2].get(key)), None)
    if found is None or key is None:
        return None
    start, end, _ = found
    before, after = single[:start], single[end:]
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        opens = before.rstrip().removesuffix("[").strip()
        return ToolSyntax(form="whole", before="", opens=opens, closes="", arguments=key, listed=True)
    first = _object(double, is_call)
    second = _object(double, is_call, first[1]) if first else None
    between = double[first[1] : second[0]] if first and second else None
    return ToolSyntax(form="whole", **_around(before, after, between), arguments=key)


def _derive_named(single: str, double: str) -> ToolSyntax | None:
    def is_arguments(value: Mapping[str, Any]) -> bool:
        return bool(value.get(_KEYS[0]))

    found = _object(single, is_arguments)
    name = single.rfind(_NAMES[0], 0, found[0]) if found else -1
    if found is None or name < 0:
        return None
    first = _object(double, is_arguments)
    second = _object(double, is_arguments, first[1]) if first else None
    between = double[first[1] : double.rfind(_NAMES[1], 0, second[0])] if first and second else None
    after_name = single[name + len(_NAMES[0]) : found[0]].strip()
    return ToolSyntax(form="named", **_around(single[:name], single[found[1] :], between), after_name=after_name)


def _derive_tagged(single: str, double: str) -> ToolSyntax | None:
    marks = [single.find(mark) for mark in (_KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    name = single.rfind(_NAMES[0], 0, max(marks[0], 0))
    if name < 0 or marks != sorted(marks) or marks[0] < 0:
        return None
    head = single[name + len(_NAMES[0]) : marks[0]]
    rest = single[marks[1] + len(_VALUES[0]) : marks[2]]
    key = _shared_end(head, rest)
    key = key[max(key.find("<"), 0) :]
    if not key.startswith("<"):
        return None
    value, ends = single[marks[0] + len(_KEYS[0]) : marks[1]].strip(), rest.removesuffix(key).strip()
    if not (value and ends):  # nothing would tell where a key or a value stops
        return None
    end = double.find(ends, double.find(_VALUES[1])) + len(ends)
    second = double.rfind(_NAMES[1], end, double.find(_KEYS[0], end)) if double else -1
    around = _around(
        single[:name], single[single.find(ends, marks[3]) + len(ends) :], double[end:second] if second >= 0 else None
    )
    return ToolSyntax(
        form="tagged", **around, after_name=head.removesuffix(key).strip(), key=key, value=value, ends=ends
    )


def _derive_python(single: str, _: str) -> ToolSyntax | None:
    first, second = (f"{key}=(['\"]){value}['\"]" for key, value in zip(_KEYS, _VALUES, strict=True))
    found = re.search(rf"\[{_NAMES[0]}\({first}, ?{second}\)\]", single)
    if found is None:
        return None
    opens, closes = single[: found.start()].strip(), single[found.end() :].strip()
    return ToolSyntax(form="python", before="", opens=opens, closes=closes)


def _around(before: str, after: str, between: str | None) -> dict[str, Any]:
    """The text that opens and closes each call: what the first and the second have in common."""
    if between is None:
        return {"before": "", "opens": before.strip(), "closes": after.strip()}
    opens = _shared_end(before.rstrip(), between.rstrip()).strip()
    closes = _shared_start(between.strip().removesuffix(opens), after.strip()).strip()
    return {"before": before.rstrip().removesuffix(opens).strip(), "opens": opens, "closes": closes}


def _shared_start(a: str, b: str) -> str:
    return next((a[:i] for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(a, b, key=len))


def _shared_end(a: str, b: str) -> str:
    return _shared_start(a[::-1], b[::-1])[::-1]


def _object(
    text: str, wanted: Callable[[Mapping[str, Any]], bool], start: int = 0
) -> tuple[int, int, dict[str, Any]] | None:
    """The first JSON object of a kind in a text: (start, end, value)."""
    for brace in re.compile("{").finditer(text, start):
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and wanted(value):
            return brace.start(), end, value
    return None
