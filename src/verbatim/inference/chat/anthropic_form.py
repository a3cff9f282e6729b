"""Writes the parts that Anthropic's whole answers and streams share: blocks, ends, counts and errors."""

from __future__ import annotations

from typing import Any

from verbatim.core.types import ToolCall
from verbatim.inference.chat.protocol import ChatReply

UNREADABLE = "unreadable_arguments"
"""The key of the sampled text of a call that cannot be read: a block's input has to be an object."""
SIGNATURE = "verbatim"
"""The signature of thinking; it is not checked where thinking comes back."""
_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "stop_string": "stop_sequence"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def content_blocks(reply: ChatReply) -> list[dict[str, Any]]:
    """The blocks of a message: thinking, text and calls, each only where there is any."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning_content:
        blocks.append({"type": "thinking", "thinking": reply.reasoning_content, "signature": SIGNATURE})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    return blocks + [call_block(call) for call in reply.tool_calls]


def call_block(call: ToolCall) -> dict[str, Any]:
    """The block of a call.

    >>> call_block(ToolCall(name="add", arguments=None, status="invalid_json", raw="{", id="c"))["input"]
    {'unreadable_arguments': '{'}
    """
    arguments = {UNREADABLE: call.raw} if call.arguments is None else dict(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name or "", "input": arguments}


def stop_of(reply: ChatReply) -> dict[str, Any]:
    """Why a message ended."""
    return {"stop_reason": _STOPS[reply.finish], "stop_sequence": reply.stop_string}


def usage_of(reply: ChatReply) -> dict[str, Any]:
    """Counts of tokens; those that came from a cache are counted apart, where the engine says how many they are."""
    cached, counts = reply.num_cached_tokens, {"output_tokens": len(reply.ids)}
    if cached is None:
        return {"input_tokens": reply.num_prompt_tokens, **counts}
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        **counts,
    }


def error_body(status: int, message: str, kind: str = "") -> dict[str, Any]:
    """An error.

    >>> error_body(404, "there is no model 'x' here")["error"]["type"]
    'not_found_error'
    """
    own = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    kind = kind if kind in _KINDS.values() else own
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
