"""Reads a completion with a family's own parser, checks each call and types its arguments by the tools' schemas."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.guard import GuardedTokenizer
from verbatim.renderers.responses import check_call, unreadable
from verbatim.renderers.schemas import types_of, word
from verbatim.types import ParseStatus, ToolCall

_log = logging.getLogger(__name__)


def read_completion(
    family: Any,
    tokenizer: GuardedTokenizer,
    ids: Sequence[int],
    prompt_ids: Sequence[int] | None,
    tools: Sequence[Mapping[str, Any]] | None,
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
    )


def _checked(call: Any, tools: Sequence[Mapping[str, Any]] | None) -> ToolCall:
    status = str(call.status.value)
    assert status in get_args(ParseStatus)
    arguments = call.arguments
    if status == "invalid_json" and isinstance(arguments, Mapping):
        # The call is whole; a value of it is not JSON.
        arguments, status = _typed(arguments, call.name, tools)
    checked = check_call(call.name, arguments, status, call.raw)  # type: ignore[arg-type]
    # Families whose calls carry an id (Kimi) expect the answer to name it.
    return dataclasses.replace(checked, id=call.id) if call.id else checked


def _typed(
    arguments: Mapping[str, Any], tool: object, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[dict[str, Any], ParseStatus]:
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
