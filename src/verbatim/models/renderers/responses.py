"""Parses sampled tool calls. Every attempt is recorded, but only well-formed calls count. Text without quotes gets the
type that the tool's schema declares."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from verbatim.core.types import ParseStatus, ToolCall
from verbatim.models.renderers.nesting import is_shallow, levels
from verbatim.models.renderers.renderer import ParsedResponse, Schemas

if TYPE_CHECKING:
    from verbatim.models.renderers.special_token_escaping import EscapingTokenizer

_log = logging.getLogger(__name__)

ReadCalls: TypeAlias = "Callable[[Sequence[int], Sequence[Mapping[str, Any]]], tuple[str, Sequence[ToolCall]] | None]"
"""(sampled ids from the first call on, schemas) -> (the text after the calls, the calls), or None if there is no call
in the family's format."""

_LAST_OF_PROMPT = 64
"""The mark that opens a thought is searched for in this many tokens at the end of a prompt."""
_MAX_BITS = 14_000
"""Maximum size of an integer, in bits. Python refuses to convert much larger integers to text
(`sys.get_int_max_str_digits`)."""
_SCALARS = frozenset({str, int, float, bool, type(None)})
_SURROGATE = re.compile("[\ud800-\udfff]")
_THOUGHT_MARK = re.compile(r"</?think(?::\w+)?>|<\|channel>|<channel\|>")
_THOUGHT_END = re.compile(r"</think(?::\w+)?>|<channel\|>")
_MOST_BRANCHES = 16
"""How deep branches and references of a schema are followed to find the types of an argument."""
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_NAMES: Mapping[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def read_completion(
    family: Any,
    tokenizer: EscapingTokenizer,
    ids: Sequence[int],
    prompt_ids: Sequence[int] | None,
    tools: Schemas,
    read_calls: ReadCalls,
    *,
    has_thought_marks: bool = True,
) -> ParsedResponse:
    """Parse content, reasoning and every attempted call of `ids`, which end before the token that closed the turn.

    A call inside a thought is part of the thinking, even if the thought is never closed. Most families' parsers would
    end an open thought at the call.

    Args:
        family: The family of the package `renderers`; its parser finds the end of the thinking and the first call.
        tokenizer: The family's tokenizer.
        ids: The sampled ids.
        prompt_ids: The prompt, which may have opened the thinking.
        tools: The tool schemas.
        read_calls: Parses the calls, from the first call on. If it finds none, the calls that the family's parser found
            are recorded as unreadable.
        has_thought_marks: True if the format puts thinking between marks. False if a call's form shows that the call is
            outside the thinking.
    """
    try:
        parsed = family.parse_response(list(ids), prompt_ids=prompt_ids, tools=tools)
        content = parsed.content
        if parsed.tool_calls and has_thought_marks and _may_think(tokenizer, ids, parsed, prompt_ids):
            thought = _open_thought(family, tokenizer, ids, parsed.tool_calls[0].token_span[0], prompt_ids)
            if thought is not None:
                return ParsedResponse(content="", reasoning_content=thought, thought_open=True)
        attempts: Sequence[ToolCall] = [_refused(call) for call in parsed.tool_calls]
        found = read_calls(ids[parsed.tool_calls[0].token_span[0] :], tools or ()) if attempts else None
        if found is not None:
            behind, attempts = found
            if not content.endswith(behind):  # GLM's parsers already include the text after the calls
                content = f"{content}\n{behind}" if content else behind
    except Exception as error:  # noqa: BLE001  models sample text that no parser expects, such as 100,000 brackets
        _log.debug("unreadable completion: %s: %s", type(error).__name__, error)
        return ParsedResponse(content="", tool_calls=(unreadable(tokenizer.decode(ids), "invalid_json"),))
    return ParsedResponse(
        content=content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=tuple(attempts),
        thought_open=parsed.reasoning_complete is False,
    )


def _may_think(tokenizer: EscapingTokenizer, ids: Sequence[int], parsed: Any, prompt_ids: Sequence[int] | None) -> bool:
    """True if the first call may be in a thought: a thought was parsed, or a mark of thinking precedes the call or ends
    the prompt.

    This cheap test avoids the second parse in `_open_thought` for most completions.
    """
    if parsed.reasoning_content is not None or parsed.reasoning_complete is False:
        return True
    first = parsed.tool_calls[0].token_span[0]
    before = tokenizer.decode(ids[:first]) if first else ""
    opened = tokenizer.decode(prompt_ids[-_LAST_OF_PROMPT:]) if prompt_ids else ""
    return _THOUGHT_MARK.search(opened + before) is not None


def _open_thought(
    family: Any, tokenizer: EscapingTokenizer, ids: Sequence[int], call: int, prompt_ids: Sequence[int] | None
) -> str | None:
    """The unclosed thought that contains the first call, which begins at `ids[call]`; None if there is none.

    A thought contains the call if it is still open before the call, or before the mark that opens the calls' section.
    """
    marks = {i for token, i in tokenizer.control_tokens.items() if _THOUGHT_MARK.fullmatch(token) is None}
    section = next((place for place, i in enumerate(ids[:call]) if i in marks), call)
    for end in dict.fromkeys((section, call)):
        if _THOUGHT_END.search(tokenizer.decode(ids[end:call])) is not None:
            continue
        before = family.parse_response(list(ids[:end]), prompt_ids=prompt_ids)
        if before.reasoning_complete is False:
            text, thought = tokenizer.decode(ids[:end]), before.reasoning_content or ""
            start = text.rfind(thought) if thought else -1  # parsers strip white space at the end
            return (text[start:] if start >= 0 else thought) + tokenizer.decode(ids[end:])
    return None


def check_call(name: object, arguments: object, status: ParseStatus, raw: str) -> ToolCall:
    """Record a call. It is "ok" only if its name is a string and its arguments are a plain JSON object.

    JSON that Python accepts but other parsers do not (NaN, half a surrogate pair, unbounded nesting) is not JSON here,
    because it would break code that serialises it later.
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


def _refused(call: Any) -> ToolCall:
    """Record text that a family's parser reported as a call, although it is not a call in the family's format."""
    status: ParseStatus = call.status.value
    assert status in get_args(ParseStatus)
    return unreadable(call.raw, "malformed_structure" if status == "ok" else status)


def unreadable(raw: str, status: ParseStatus) -> ToolCall:
    """Record an attempt that could not be parsed at all."""
    return ToolCall(name=None, arguments=None, status=status, raw=raw)


NOT_JSON: Any = object()
"""The result of `read_json` for a text that is not JSON."""


def read_json(text: str) -> Any:
    """The value of a JSON text, or `NOT_JSON`. An object with a duplicate key is `NOT_JSON`, because one of the two
    values would be lost."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return NOT_JSON


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def arguments_as_value(arguments: object) -> Any:
    """The arguments of a message's call as a value. JSON text is parsed; text that is not JSON is returned unchanged.

    >>> arguments_as_value('{"at": "Bonn"}'), arguments_as_value(None), arguments_as_value("at Bonn")
    ({'at': 'Bonn'}, {}, 'at Bonn')
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = read_json(arguments) if isinstance(arguments, str) else arguments
    return arguments if value is NOT_JSON else value


def is_json(value: object) -> bool:
    """True if a value can be written as JSON text in UTF-8 and is nested less than `MAX_DEPTH` deep."""
    if type(value) in _SCALARS:
        return _is_json_item(value)
    if type(value) is dict and all(type(item) in _SCALARS for item in value.values()):  # fast path: most arguments
        return _is_json_item(value) and all(map(_is_json_item, value.values()))
    return is_shallow(value) and all(_is_json_item(item) for level in levels(value) for item in level)


def _is_json_item(item: object) -> bool:
    """True if a value is JSON, without considering its members."""
    if isinstance(item, str):
        return item.isascii() or _SURROGATE.search(item) is None
    if isinstance(item, dict):
        return all(isinstance(key, str) and _is_json_item(key) for key in item)
    if isinstance(item, int):
        return item.bit_length() <= _MAX_BITS
    return item is None or isinstance(item, list) or (isinstance(item, float) and math.isfinite(item))


def types_of(tools: object, name: object, parameter: str) -> frozenset[str]:
    """The JSON types that a parameter of a tool may have; empty if the schema declares none.

    Schemas come from environments; a malformed schema declares no types.

    >>> look = {"name": "look", "parameters": {"properties": {"at": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}}
    >>> sorted(types_of([{"type": "function", "function": look}], "look", "at"))
    ['null', 'string']
    """
    root = _parameters(tools, name)
    return frozenset(_types(_mapping(root.get("properties")).get(parameter), root, set())) & _TYPES


def _types(schema: object, root: Mapping[str, Any], seen: set[str], depth: int = 0) -> Iterator[str]:
    """The types in a schema: the types that it declares (or the types of its `const` or `enum`), and the types in its
    branches and references.

    `seen` holds the references that were already followed, because schemas may be recursive.
    """
    if depth == _MOST_BRANCHES or not isinstance(schema, Mapping):
        return
    kinds = schema.get("type")
    yield from (kind for kind in _list(kinds, kinds) if isinstance(kind, str))
    if kinds is None:
        for value in [schema["const"]] if "const" in schema else _list(schema.get("enum")):
            yield from type_names(value)
    if schema.get("nullable") is True:  # OpenAPI's form, from which some tools' schemas are generated
        yield "null"
    for branch in (branch for key in ("anyOf", "oneOf", "allOf") for branch in _list(schema.get(key))):
        yield from _types(branch, root, seen, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _types(_referred(reference, root), root, seen, depth + 1)


def type_names(value: object) -> frozenset[str]:
    """The names of the JSON types that a value has; empty if it is not JSON.

    >>> sorted(type_names(5)), sorted(type_names(5.0)), sorted(type_names(None))
    (['integer', 'number'], ['number'], ['null'])
    """
    return _NAMES.get(type(value), frozenset())


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """The target of a reference inside a tool's parameters, such as "#/$defs/Code"; None if it does not exist."""
    found: object = root if reference.startswith("#/") else None
    for step in reference.split("/")[1:]:
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


def parameters_of(tools: object, name: object) -> frozenset[str]:
    """The parameters that a tool declares; empty if it declares none, or there is no such tool."""
    properties = _mapping(_parameters(tools, name).get("properties"))
    return frozenset(key for key in properties if isinstance(key, str))


def _parameters(tools: object, name: object) -> Mapping[str, Any]:
    for tool in _list(tools):
        function = _mapping(_mapping(tool).get("function", tool))
        if function and function.get("name") == name:
            return _mapping(function.get("parameters"))
    return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object, *otherwise: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, (list, tuple)) else otherwise
