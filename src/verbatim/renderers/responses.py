"""What a model sampled, read as a message: every attempted call is kept, and only whole ones count as calls."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.guard import GuardedTokenizer
from verbatim.types import Int32, ParseStatus, ToolCall

MAX_DEPTH = 64
"""Of the arguments' nesting; deeper ones would overflow the stack of whatever reads them next."""

_log = logging.getLogger(__name__)


def read_response(
    family: Any,
    tokenizer: GuardedTokenizer,
    completion_ids: Int32,
    prompt_ids: Int32 | None,
    stop_token_ids: Sequence[int],
) -> ParsedResponse:
    """A completion as the package's parser reads it, checked call by call."""
    ids = completion_ids.tolist()
    stop = next((i for i, token in enumerate(ids) if token in stop_token_ids), len(ids))
    try:
        parsed = family.parse_response(ids[:stop], prompt_ids=None if prompt_ids is None else prompt_ids.tolist())
    except Exception as error:  # noqa: BLE001  models sample what no parser foresaw (100,000 brackets): that call is unreadable
        _log.debug("unreadable completion: %s: %s", type(error).__name__, error)
        text = tokenizer.decode(ids[:stop])
        return ParsedResponse(content="", tool_calls=(unreadable(text, "invalid_json"),))
    return ParsedResponse(
        content=parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=tuple(
            check_call(call.name, call.arguments, _STATUS[str(call.status.value)], call.raw)
            for call in parsed.tool_calls
        ),
    )


_STATUS: Mapping[str, ParseStatus] = {
    "ok": "ok",
    "invalid_json": "invalid_json",
    "unclosed_block": "unclosed_block",
    "missing_name": "missing_name",
    "malformed_structure": "malformed_structure",
    "unknown_tool": "unknown_tool",
}


def check_call(name: object, arguments: object, status: ParseStatus, raw: str) -> ToolCall:
    """A call as a record: "ok" only with a name that is text and arguments that are a plain JSON object.

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
    """An attempt of which nothing could be read."""
    return ToolCall(name=None, arguments=None, status=status, raw=raw)


def is_json(value: object) -> bool:
    """Whether a value can be written as JSON text in UTF-8 and be nested less than `MAX_DEPTH` deep."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return True
        if any(not _is_json_scalar(item) for item in level):
            return False
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                deeper += item
        level = deeper
    return False


def _is_json_scalar(item: object) -> bool:
    if isinstance(item, str):
        return not any("\ud800" <= c <= "\udfff" for c in item)
    return not isinstance(item, float) or math.isfinite(item)


def parse_hermes_call(text: str) -> ToolCall:
    """The JSON between `<tool_call>` and `</tool_call>`, for tokenizers that have no such tokens."""
    raw = text.strip()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return unreadable(raw, "invalid_json")
    if not isinstance(value, dict):
        return unreadable(raw, "malformed_structure")
    if not value.get("name"):
        return unreadable(raw, "missing_name")
    return check_call(value["name"], value.get("arguments", {}), "ok", raw)
