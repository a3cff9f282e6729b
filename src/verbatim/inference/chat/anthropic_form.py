"""Builds the objects of Anthropic's Messages format, for non-streamed responses and for streams: blocks, stop reasons,
usage and errors."""

from __future__ import annotations

from typing import Any

from verbatim.core.types import ToolCall
from verbatim.inference.chat.protocol import ChatReply

UNREADABLE = "unreadable_arguments"
"""Key that holds the sampled text of a call that cannot be parsed. It is needed because the input of a block has to be
an object."""
SIGNATURE = "verbatim"
"""Placeholder for the signature that the protocol requires in thinking blocks. It is not checked when a client sends a
thinking block back."""
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
    """The content blocks of a message: thinking, text and tool calls, if the reply has them."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning_content:
        blocks.append({"type": "thinking", "thinking": reply.reasoning_content, "signature": SIGNATURE})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    return blocks + [call_block(call) for call in reply.tool_calls]


def call_block(call: ToolCall) -> dict[str, Any]:
    """The block of a tool call.

    >>> call_block(ToolCall(name="add", arguments=None, status="invalid_json", raw="{", id="c"))["input"]
    {'unreadable_arguments': '{'}
    """
    arguments = {UNREADABLE: call.raw} if call.arguments is None else dict(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name or "", "input": arguments}


def stop_of(reply: ChatReply) -> dict[str, Any]:
    """The fields that say why a message ended."""
    return {"stop_reason": _STOPS[reply.finish], "stop_sequence": reply.stop_string}


def usage_of(reply: ChatReply) -> dict[str, Any]:
    """Token counts. If the engine reports cached prompt tokens, they are counted separately, as the protocol
    requires."""
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
    """The body of an error, in Anthropic's format.

    >>> error_body(404, "there is no model 'x' here")["error"]["type"]
    'not_found_error'
    """
    own = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    kind = kind if kind in _KINDS.values() else own  # clients only know the protocol's own types
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
