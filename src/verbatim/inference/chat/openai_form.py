"""Builds the objects of OpenAI's chat-completions format, for non-streamed responses and for streams: messages,
logprobs, usage and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, TokenLogprob, arguments_text
from verbatim.inference.chat.streaming import token_logprobs
from verbatim.inference.http.protocol import OURS

FINISH = {"stop": "stop", "stop_string": "stop", "tool_calls": "tool_calls", "length": "length"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def choice_body(request: ChatRequest, reply: ChatReply, index: int) -> dict[str, Any]:
    """One choice of a non-streamed response."""
    choice: dict[str, Any] = {"index": index, "message": message_body(reply), **ending(request, reply)}
    choice["logprobs"] = {"content": logprobs_body(token_logprobs(reply))} if request.include_logprobs else None
    return choice


def ending(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """The final fields of a choice: the finish reason, and the ids and policy versions if requested."""
    found: dict[str, Any] = {"finish_reason": FINISH[reply.finish]}
    if reply.stop_string is not None:
        found["stop_reason"] = reply.stop_string  # the same key and position as in vLLM
    if request.include_token_ids:
        found["token_ids"] = reply.ids.tolist()
    ours: dict[str, Any] = {} if reply.seed is None else {"seed": reply.seed}
    if request.include_token_ids and reply.policy_versions is not None:
        ours["policy_versions"] = reply.policy_versions.tolist()
    return {**found, OURS: ours} if ours else found


def message_body(reply: ChatReply) -> dict[str, Any]:
    """The assistant message."""
    message: dict[str, Any] = {**reply.message}
    if reply.tool_calls:
        message["tool_calls"] = [call_body(call) for call in reply.tool_calls]
    return message


def call_body(call: ToolCall) -> dict[str, Any]:
    """A function call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name or "", "arguments": arguments_text(call)}}


def logprobs_body(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Sampled tokens with their logprobs. `bytes` is the UTF-8 text of the token decoded alone."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode(errors="replace")),
            "top_logprobs": [],
        }
        for token in tokens
    ]


def usage_of(replies: Sequence[ChatReply]) -> dict[str, Any]:
    """Token counts: the prompt, counted once, and the completions of all replies."""
    prompt, completion = replies[0].num_prompt_tokens, sum(len(reply.ids) for reply in replies)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if replies[0].num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": replies[0].num_cached_tokens}
    return usage


def error_body(status: int, message: str, field: str = "", kind: str = "") -> dict[str, Any]:
    """The body of an error, in OpenAI's format.

    >>> error_body(400, "n = 0; expected an integer from 1 to 64", "n")["error"]["param"]
    'n'
    """
    kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "unavailable")
    return {"error": {"message": message, "type": kind, "param": field or None, "code": status}}
