"""Builds the objects of OpenAI's Responses format, for non-streamed responses and for streams: items, response,
usage."""

from __future__ import annotations

from typing import Any

from verbatim.core.types import ToolCall
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp, ToolForm, arguments_text
from verbatim.inference.chat.responses_tools import INPUT


def response_body(request: ChatRequest, stamp: Stamp, reply: ChatReply | None) -> dict[str, Any]:
    """The response object. If `reply` is None, the object is the unfinished response that a stream begins with."""
    echo = request.echo
    body: dict[str, Any] = {
        "id": f"resp_{stamp.id}",
        "object": "response",
        "created_at": stamp.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": stamp.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "top_logprobs": 0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **echo,
    }
    if reply is None:
        return body
    is_whole = reply.finish != "length"
    return {
        **body,
        "status": "completed" if is_whole else "incomplete",
        "output": output_items(request, stamp, reply),
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "usage": usage_of(reply),
    }


def output_items(request: ChatRequest, stamp: Stamp, reply: ChatReply) -> list[dict[str, Any]]:
    """The output items of a reply: thinking and text if the reply has them, then the tool calls. A reply without calls
    always has a text item."""
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning_content:
        items.append(reasoning_item(stamp, reply.reasoning_content))
    if has_text(reply):
        items.append(message_item(stamp, reply.content, status))
    return items + [call_item(request, stamp, k, call) for k, call in enumerate(reply.tool_calls)]


def has_text(reply: ChatReply) -> bool:
    """True if the reply has a text item."""
    return bool(reply.content) or not reply.tool_calls


def reasoning_item(stamp: Stamp, text: str | None) -> dict[str, Any]:
    """A thinking item; `text` is None for the empty item that a stream begins with."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{stamp.id}", "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}


def message_item(stamp: Stamp, text: str | None, status: str) -> dict[str, Any]:
    """A text item; `text` is None for the empty item that a stream begins with."""
    return {
        "id": f"msg_{stamp.id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str) -> dict[str, Any]:
    """The content part of a text item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(request: ChatRequest, stamp: Stamp, number: int, call: ToolCall) -> dict[str, Any]:
    """A tool call, in the form in which the request declared the tool. The call's result will refer to its `call_id`.

    If the arguments of a custom tool are not a single string, its call becomes a function call, so that the client
    receives everything that was sampled.
    """
    form = request.tool_forms.get(call.name or "", ToolForm(name=call.name or ""))
    within = {"namespace": form.namespace} if form.namespace else {}
    if form.is_custom and set(call.arguments or ()) == {INPUT} and isinstance((call.arguments or {})[INPUT], str):
        return {
            "id": f"ctc_{stamp.id}_{number}",
            "type": "custom_tool_call",
            "call_id": call.id,
            "name": form.name,
            "input": (call.arguments or {})[INPUT],
            **within,
        }
    return {
        "id": f"fc_{stamp.id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": form.name,
        "arguments": arguments_text(call),
        "status": "completed",
        **within,
    }


def usage_of(reply: ChatReply) -> dict[str, Any]:
    """Token counts. Thinking is not counted separately. Clients require the number of cached tokens, so it is 0 if the
    engine does not report it."""
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": len(reply.ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + len(reply.ids),
    }
