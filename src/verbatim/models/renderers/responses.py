"""Reads sampled tool calls: every attempt is kept, only well-formed ones count, bare text is typed by schemas."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from verbatim.renderers.base import ParsedResponse, Schemas
from verbatim.types import ParseStatus, ToolCall

if TYPE_CHECKING:
    from verbatim.renderers.guard import GuardedTokenizer

_log = logging.getLogger(__name__)

MAX_DEPTH = 64
"""The deepest nesting of arguments; deeper values would overflow the stack of later readers."""
_MAX_BITS = 14_000
"""The largest integer, in bits; Python refuses to write longer ones (`sys.get_int_max_str_digits`)."""
_SCALARS = frozenset({str, int, float, bool, type(None)})
_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS: Mapping[str, tuple[str, Any]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
"""Templates that write arguments as text write Python's words; the JSON type that makes one more than a word."""


def read_completion(
    family: Any, tokenizer: GuardedTokenizer, ids: Sequence[int], prompt_ids: Sequence[int] | None, tools: Schemas
) -> ParsedResponse:
    """Content, reasoning and every attempted call of `ids`, which end before the token that closed the turn.

    Some families write `<parameter=n>5</parameter>`: only the schema says whether that is the number 5 or the text
    "5". Without `tools`, what reads as JSON is JSON and the rest is text.
    """
    try:
        parsed = family.parse_response(list(ids), prompt_ids=prompt_ids, tools=tools)
    except Exception as error:  # noqa: BLE001  models sample what no parser foresaw (100,000 brackets): that call is unreadable
        _log.debug("unreadable completion: %s: %s", type(error).__name__, error)
        return ParsedResponse(content="", tool_calls=(unreadable(tokenizer.decode(ids), "invalid_json"),))
    return ParsedResponse(
        content=parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=tuple(_checked(call, tools) for call in parsed.tool_calls),
        thought_open=parsed.reasoning_complete is False,
    )


def _checked(call: Any, tools: Schemas) -> ToolCall:
    status = str(call.status.value)
    assert status in get_args(ParseStatus)
    arguments = call.arguments
    if status == "invalid_json" and isinstance(arguments, Mapping):
        # The call is whole; a value of it is not JSON.
        arguments, status = _typed(arguments, call.name, tools)
    checked = check_call(call.name, arguments, status, call.raw)  # type: ignore[arg-type]
    # Families whose calls carry an id (Kimi) expect the answer to name it.
    return dataclasses.replace(checked, id=call.id) if call.id else checked


def _typed(arguments: Mapping[str, Any], tool: object, tools: Schemas) -> tuple[dict[str, Any], ParseStatus]:
    """Arguments that are bare text, by their declared types; "ok" if each is of a type that was declared.

    >>> look = {"name": "look", "parameters": {"properties": {"deep": {"type": "boolean"}, "at": {"type": "string"}}}}
    >>> _typed({"deep": "True", "at": "Bonn"}, "look", [{"type": "function", "function": look}])
    ({'deep': True, 'at': 'Bonn'}, 'ok')
    """
    typed = dict(arguments)
    status: ParseStatus = "ok"
    for name, value in arguments.items():
        types = types_of(tools, tool, name)
        if not isinstance(value, str) or "string" in types:
            continue
        is_word, meant = word(value, types)
        if is_word:
            typed[name] = meant
        elif types and not _is_json(value):
            status = "invalid_json"
    return typed, status


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def check_call(name: object, arguments: object, status: ParseStatus, raw: str) -> ToolCall:
    """Record a call; it is "ok" only with a text as name and a plain JSON object as arguments.

    JSON that Python reads but others do not (NaN, half a surrogate pair, bottomless nesting) is not JSON here: it
    would break whatever writes it down later.
    """
    if status == "ok" and not (isinstance(name, str) and name and isinstance(arguments, dict)):
        status = "malformed_structure"
    if status == "ok" and not (is_json(arguments) and is_json(name)):
        status = "invalid_json"
    return ToolCall(
        name=name if isinstance(name, str) and is_json(name) else None,
        arguments=arguments if status == "ok" and isinstance(arguments, dict) else None,
        status=status,
        raw=raw,
    )


def unreadable(raw: str, status: ParseStatus) -> ToolCall:
    """Record an attempt that could not be read at all."""
    return ToolCall(name=None, arguments=None, status=status, raw=raw)


def is_json(value: object) -> bool:
    """Whether a value can be written as JSON text in UTF-8 and be nested less than `MAX_DEPTH` deep."""
    if type(value) in _SCALARS:
        return _is_json_item(value)
    if type(value) is dict and all(type(item) in _SCALARS for item in value.values()):  # as most arguments are
        return _is_json_item(value) and all(map(_is_json_item, value.values()))
    return is_shallow(value) and all(_is_json_item(item) for level in levels(value) for item in level)


def is_shallow(value: object) -> bool:
    """Whether a value is nested less than `MAX_DEPTH` deep; one that holds itself is not."""
    return all(depth < MAX_DEPTH for depth, _ in enumerate(levels(value)))


def levels(value: object) -> Iterator[list[object]]:
    """The value, then all that is in it, then all that is in that, and so on; each object once a level."""
    level = [value]
    while level:
        yield level
        inner = [
            item
            for outer in level
            if isinstance(outer, (Mapping, list, tuple))
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        level = list({id(item): item for item in inner}.values())


def _is_json_item(item: object) -> bool:
    """Whether a value is JSON, whatever is in it."""
    if isinstance(item, str):
        return item.isascii() or _SURROGATE.search(item) is None
    if isinstance(item, dict):
        return all(isinstance(key, str) and _is_json_item(key) for key in item)
    if isinstance(item, int):
        return item.bit_length() <= _MAX_BITS
    return item is None or isinstance(item, list) or (isinstance(item, float) and math.isfinite(item))


def types_of(tools: object, name: object, parameter: str) -> frozenset[str]:
    """The JSON types that a parameter of a tool may have; empty if the schema declares none.

    Schemas come from environments: one that is malformed says nothing.

    >>> look = {"name": "look", "parameters": {"properties": {"at": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}}
    >>> sorted(types_of([{"type": "function", "function": look}], "look", "at"))
    ['null', 'string']
    """
    for tool in _list(tools):
        function = _mapping(_mapping(tool).get("function", tool))
        if function and function.get("name") == name:
            schema = _mapping(_mapping(_mapping(function.get("parameters")).get("properties")).get(parameter))
            branches = [schema, *(_mapping(branch) for key in ("anyOf", "oneOf") for branch in _list(schema.get(key)))]
            kinds = [kind for branch in branches for kind in _list(branch.get("type"), branch.get("type"))]
            return frozenset(kind for kind in kinds if isinstance(kind, str)) & _TYPES
    return frozenset()


def word(text: str, types: frozenset[str]) -> tuple[bool, Any]:
    """Whether a text is a word for a value of one of these types, and the value.

    >>> word("True", frozenset({"boolean"})), word("None", frozenset({"integer"}))
    ((True, True), (False, None))
    """
    kind, value = _WORDS.get(text.strip().lower(), ("", None))
    return (True, value) if kind in types else (False, None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object, *otherwise: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, (list, tuple)) else otherwise
