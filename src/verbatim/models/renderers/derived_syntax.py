"""Finds the syntax of a model's tool calls by rendering calls with its chat template.

The template renders calls with known, unique names and arguments. The text around the names and arguments is the
syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verbatim.models.renderers.probe_messages import Render, tried
from verbatim.models.renderers.tagged_calls import ArgumentTags
from verbatim.models.renderers.tool_syntax import ANY_NAME, ToolSyntax

_NAMES = ("zqfirst", "zqother")
_KEYS = ("zqone", "zqtwo")
_VALUES = ("zqalpha", "zqbeta")
_CALL_ID = "zqcall00"
_CONTENT = "zqcontent"
_HOSTILE = (r"zq\b", """zq"'<&""")  # characters that formats escape in different ways
_NUMBERS = (7340051, 7340053)
_WORDS = (True, None)
_LONGEST = 50_000
"""Maximum length of a rendering that is searched, in characters."""


def derive(render: Render, stops: Sequence[str], *, marks: Sequence[str] = ()) -> ToolSyntax | None:
    """The syntax in which a format writes tool calls; None if the format writes no calls, or an unknown form of calls.

    Args:
        render: Renders with the format.
        stops: The tokens that end a turn, as text. They are not part of a call.
        marks: For the form `marked`: the tokens that may be the marks around strings.
    """

    def marked(single: str, double: str) -> ToolSyntax | None:
        return _derive_marked(single, double, marks)

    for by_id in (False, True):
        single, double = (_written(render, _calls(number, by_id), stops) for number in (1, 2))
        if single is None:
            continue
        is_named_by_id = _ids(1)[0] in single
        if is_named_by_id:
            single, double = (_named(text) for text in (single, double or ""))
        for form in (_derive_whole, _derive_named, _derive_tagged, _derive_python, marked):
            syntax = form(single, double or "")
            if syntax is not None:
                found = replace(syntax, named_by_id=is_named_by_id and form is _derive_named)
                return _checked(_with_values(found, render, stops), render, stops)
    return None


def _ids(number: int) -> list[str]:
    """Call ids that contain the tool's name, for formats that write a call's id instead of its name (Kimi)."""
    return [f"functions.{name}:{place}" for place, name in enumerate(_NAMES[:number])]


def _calls(number: int, by_id: bool, values: Sequence[Any] = _VALUES) -> list[dict[str, Any]]:
    ids = _ids(number) if by_id else [f"{_CALL_ID}{place}" for place in range(number)]
    arguments = dict(zip(_KEYS, values, strict=True))
    return [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name in zip(ids, _NAMES, strict=False)
    ]


def _named(text: str) -> str:
    """A rendering with each call id replaced by the tool's name, so that the functions for the forms can find the
    name."""
    for i, name in zip(_ids(2), _NAMES, strict=True):
        text = text.replace(i, name)
    return text


def _with_values(syntax: ToolSyntax, render: Render, stops: Sequence[str]) -> ToolSyntax:
    """The syntax, completed with the way in which the format writes values that are not strings.

    This adds the text before such values if it differs from the text before strings, and whether null and booleans are
    written as Python's words.
    """
    if syntax.tags is None:
        return syntax
    numbers, words = (_written(render, _calls(1, False, values), stops) or "" for values in (_NUMBERS, _WORDS))
    json = numbers[: numbers.find(str(_NUMBERS[0]))].rpartition(_KEYS[0])[2].strip()
    tags = replace(syntax.tags, python_words=str(True) in words)
    return replace(syntax, tags=tags if json in ("", tags.value) else replace(tags, json=json))


def _checked(syntax: ToolSyntax, render: Render, stops: Sequence[str]) -> ToolSyntax | None:
    """The syntax if it parses strings with quotes and backslashes back as written, else None."""
    if not syntax.opens and syntax.form != "whole":
        return None
    text = _written(render, _calls(1, syntax.named_by_id, _HOSTILE), stops) or ""
    if syntax.form == "python":
        if _HOSTILE[0].replace("\\", "\\\\") not in text:
            return syntax
        syntax = replace(syntax, quote="")
    _, calls = syntax.read(text)
    return syntax if [call.arguments for call in calls] == [dict(zip(_KEYS, _HOSTILE, strict=True))] else None


def _written(render: Render, calls: list[dict[str, Any]], stops: Sequence[str]) -> str | None:
    """Render these calls once with and once without content, and return the text that both renderings share; None if
    the calls are missing."""
    texts = []
    for content in (_CONTENT, "", None):
        ask = {"role": "user", "content": "zqquestion"}
        reply = {"role": "assistant", "content": content, "tool_calls": calls}
        whole, start = tried(render, [ask, reply], None, False), tried(render, [ask], None, True)
        if start and len(whole) <= _LONGEST and all(call["function"]["name"] in whole for call in calls):
            text = whole[_whole_tags(whole, len(_shared_start(whole, start))) :]
            text = text.partition(_CONTENT)[2] if _CONTENT in text.partition(_NAMES[0])[0] else text
            values = (str(value) for call in calls for value in call["function"]["arguments"].values())
            last = max(text.rfind(mark) for mark in (*_NAMES, *values))
            ends = [text.find(stop, last) for stop in (*stops, _CONTENT) if text.find(stop, last) >= 0]
            texts.append(text[: min(ends, default=len(text))])
    return _shared_end(texts[0], texts[-1]) if texts else None


def _whole_tags(text: str, end: int) -> int:
    """The last index up to `end` that is not inside a tag."""
    start = text.rfind("<", 0, end)
    return end if start < 0 or ">" in text[start:end] else start


def _derive_whole(single: str, double: str) -> ToolSyntax | None:
    """The form `whole`, from renderings of one and of two calls; None if the calls have another form."""

    def is_call(value: Mapping[str, Any]) -> bool:
        return value.get("name") in _NAMES

    found = _object(single, is_call)
    key = next((key for key in ("arguments", "parameters") if found and found[2].get(key)), None)
    if found is None or key is None:
        return None
    start, end, written = found
    before, after, others = single[:start], single[end:], frozenset(written) - {"name", key}
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        opens = before.rstrip().removesuffix("[").strip()
        return ToolSyntax(form="whole", before="", opens=opens, closes="", arguments=key, others=others, listed=True)
    first = _object(double, is_call)
    second = _object(double, is_call, first[1]) if first else None
    between = double[first[1] : second[0]] if first and second else None
    return ToolSyntax(form="whole", **_around(before, after, between), arguments=key, others=others)


def _derive_named(single: str, double: str) -> ToolSyntax | None:
    """The form `named`, from renderings of one and of two calls; None if the calls have another form."""

    def is_arguments(value: Mapping[str, Any]) -> bool:
        return bool(value.get(_KEYS[0]))

    found = _object(single, is_arguments)
    name = single.rfind(_NAMES[0], 0, found[0]) if found else -1
    if found is None or name < 0:
        return None
    first = _object(double, is_arguments)
    second = _object(double, is_arguments, first[1]) if first else None
    between = double[first[1] : double.rfind(_NAMES[1], 0, second[0])] if first and second else None
    after_name, has_id, after_id = single[name + len(_NAMES[0]) : found[0]].strip().partition(_CALL_ID + "0")
    if has_id and not (after_name.strip() and after_id.strip()):  # the end of a name or an id could not be found
        return None
    return ToolSyntax(
        form="named",
        **_around(single[:name], single[found[1] :], between),
        after_name=after_name.strip(),
        after_id=after_id.strip(),
    )


def _derive_tagged(single: str, double: str) -> ToolSyntax | None:
    """The form `tagged`, from renderings of one and of two calls; None if the calls have another form."""
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
    value, ends = single[marks[0] + len(_KEYS[0]) : marks[1]], rest.removesuffix(key)
    tags = ArgumentTags(
        key=key,
        value=value.strip(),
        ends=ends.strip(),
        padding=(value[len(value.rstrip()) :], ends[: len(ends) - len(ends.lstrip())]),
        gap=ends[len(ends.rstrip()) :],
    )
    if not (tags.value and tags.ends):  # the end of a key or a value could not be found
        return None
    ends = tags.ends
    end = double.find(ends, double.find(_VALUES[1])) + len(ends)
    second = double.rfind(_NAMES[1], end, double.find(_KEYS[0], end)) if double else -1
    around = _around(
        single[:name], single[single.find(ends, marks[3]) + len(ends) :], double[end:second] if second >= 0 else None
    )
    return ToolSyntax(form="tagged", **around, after_name=head.removesuffix(key).strip(), tags=tags)


def _derive_python(single: str, _: str) -> ToolSyntax | None:
    """The form `python`, from the rendering of one call; None if the call has another form."""
    first, second = (f"{key}=(['\"]){value}['\"]" for key, value in zip(_KEYS, _VALUES, strict=True))
    found = re.search(rf"\[{_NAMES[0]}\({first}, ?{second}\)\]", single)
    if found is None:
        return None
    opens, closes = single[: found.start()].strip(), single[found.end() :].strip()
    return ToolSyntax(form="python", before="", opens=opens, closes=closes, quote=found[1])


def _derive_marked(single: str, double: str, marks: Sequence[str]) -> ToolSyntax | None:
    """The form `marked`, from renderings of one and of two calls; None if the calls have another form."""
    found = re.search(rf"{_NAMES[0]}\{{{_KEYS[0]}:(.+?){_VALUES[0]}\1,{_KEYS[1]}:\1{_VALUES[1]}\1\}}", single)
    if found is None or found[1] not in marks:
        return None
    end, second = double.find(found[0]) + len(found[0]), double.rfind(_NAMES[1])
    between = double[end:second] if found[0] in double and second >= end else None
    around = _around(single[: found.start()], single[found.end() :], between)
    return ToolSyntax(form="marked", **around, mark=found[1])


def _around(before: str, after: str, between: str | None) -> dict[str, Any]:
    """(text that opens each call, text that closes it), found as what the first two calls have in common."""
    if between is None:
        return {"before": "", "opens": before.strip(), "closes": after.strip()}
    opens = _from_tag(before.rstrip(), len(_shared_end(before.rstrip(), between.rstrip())))
    closes = _shared_start(between.strip().removesuffix(opens), after.strip()).strip()
    first = before.rstrip().removesuffix(opens).strip().replace(_NAMES[0], ANY_NAME)
    last = after.strip().removeprefix(closes).strip()
    return {"before": first, "opens": opens, "closes": closes, "after": last}


def _from_tag(text: str, shared: int) -> str:
    """The last `shared` characters, without the rest of a tag that begins before them."""
    end = text[len(text) - shared :]
    if shared == len(text) or end[:1] in ("", "<", "[") or text[-shared - 1].isspace():
        return end.strip()
    whole = re.search(r"[<\[\s]", end)
    return end[whole.start() :].strip() if whole else end.strip()


def _shared_start(a: str, b: str) -> str:
    return next((a[:i] for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(a, b, key=len))


def _shared_end(a: str, b: str) -> str:
    return _shared_start(a[::-1], b[::-1])[::-1]


def _object(
    text: str, wanted: Callable[[Mapping[str, Any]], bool], start: int = 0
) -> tuple[int, int, dict[str, Any]] | None:
    """(start, end, value) of the first JSON object in a text for which `wanted` is true; None if there is none."""
    for brace in re.compile("{").finditer(text, start):
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and wanted(value):
            return brace.start(), end, value
    return None
