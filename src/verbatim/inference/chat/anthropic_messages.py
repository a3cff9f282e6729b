"""Anthropic's Messages protocol: reads requests, and writes responses and token counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from verbatim.core.texts import brief
from verbatim.core.types import Message, MessageToolCall
from verbatim.inference.chat.anthropic_form import UNREADABLE, content_blocks, error_body, stop_of, usage_of
from verbatim.inference.chat.anthropic_stream import AnthropicStream
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.fields import (
    MOST_MESSAGES,
    MOST_TOOLS,
    BadField,
    Fields,
    as_tool_choice,
    object_of,
    read_flag,
    read_integer,
    read_list,
    read_object,
    read_stops,
    text_of,
)
from verbatim.inference.chat.messages import Order, call_of, function_tool, joined_text, refuse_begun
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp, ToolChoice
from verbatim.inference.http.protocol import OURS

FIELDS = Fields(
    honoured={
        "model", "max_tokens", "messages", "system", "tools", "tool_choice", "temperature", "top_p", "top_k",
        "stop_sequences", "stream", "thinking", "output_config", OURS,
    },
    without_effect={"metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id",
                    "workspace_id", "betas"},
    neutral={"output_format": (), "context_management": (), "container": (), "mcp_servers": ([],), "diagnostics": ()},
    aliases={"output_format": "response_format"},
)  # fmt: skip
"""How each field of a request is treated."""
_OUTPUT = Fields(
    honoured=(),
    neutral={"effort": (), "format": ()},
    aliases={"effort": "reasoning_effort", "format": "response_format"},
)
_THINKING = Fields(honoured={"type", "budget_tokens"}, neutral={"display": ("summarized",)})
_TOOL = Fields(
    honoured={"name", "description", "input_schema", "type"},
    without_effect={"cache_control", "strict", "eager_input_streaming"},
    neutral={"defer_loading": (False,), "allowed_callers": (["direct"],), "input_examples": ([],)},
)
_MESSAGE = Fields(honoured={"role", "content"}, without_effect={"id", "cache_control"})
_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}


@dataclass(frozen=True)
class AnthropicMessages(ChatProtocol):
    """Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

    name, fields, max_tokens = "anthropic_messages", FIELDS, ("max_tokens",)

    needs_limit: bool = True
    """True if `max_tokens` is required. Token-counting requests do not have it."""

    def read_own(self, body: Mapping[str, Any]) -> ChatRequest:
        """See `ChatProtocol.read_own`."""
        unenforced = _OUTPUT.check(read_object(body, "output_config"), self.options, "output_config")
        unenforced += self._check_thinking(read_object(body, "thinking"))
        if self.needs_limit and body.get("max_tokens") is None:
            raise BadField("max_tokens", "max_tokens: expected the maximum number of tokens to sample, found nothing")
        tools = tuple(
            _read_tool(tool, f"tools[{k}]") for k, tool in enumerate(read_list(body, "tools", most=MOST_TOOLS))
        )
        given = read_object(body, "tool_choice")
        choice, name = _read_tool_choice(given)
        return ChatRequest(
            protocol=self.name,
            messages=_read_messages(body),
            tools=tools,
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=not read_flag(given, "disable_parallel_tool_use"),
            stop=read_stops(body, "stop_sequences"),
            include_usage=True,
            unenforced=unenforced,
        )

    def _check_thinking(self, thinking: Mapping[str, Any]) -> tuple[str, ...]:
        """Check the `thinking` object. The chat template decides whether the model thinks, so "disabled" is refused;
        `budget_tokens` is only a target in the protocol, so any value is accepted."""
        _THINKING.check(thinking, self.options, "thinking")
        kind = thinking.get("type")
        if kind == "disabled":
            if "thinking" in self.options.unenforced:
                return ("thinking",)
            raise BadField(
                "thinking",
                "thinking = disabled cannot be honoured here: the model's chat template decides whether it thinks; "
                "leave thinking out",
            )
        if kind not in (None, "enabled", "adaptive", "between_tools"):
            raise BadField("thinking", f"thinking.type = {brief(kind)}; expected enabled, adaptive or between_tools")
        read_integer(thinking, "budget_tokens", least=1)
        return ()

    def count(self, num_prompt_tokens: int) -> dict[str, Any]:
        """The response to a token-counting request."""
        return {"input_tokens": num_prompt_tokens}

    def answer(self, request: ChatRequest, replies: Sequence[ChatReply], stamp: Stamp) -> dict[str, Any]:
        """The body of a non-streamed response."""
        (reply,) = replies
        return {
            "id": f"msg_{stamp.id}",
            "type": "message",
            "role": "assistant",
            "model": stamp.model,
            "content": content_blocks(reply),
            **stop_of(reply),
            "usage": usage_of(reply),
        }

    def stream(self, request: ChatRequest, stamp: Stamp) -> AnthropicStream:
        """The writer of a streamed response."""
        return AnthropicStream(stamp)

    def error(self, status: int, message: str, field: str = "", kind: str = "") -> dict[str, Any]:
        """The body of an error. The protocol has no key for the refused field, so only the message names it."""
        return error_body(status, message, kind)


def _read_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """Read the conversation: the system prompt, then the messages, with each tool result as a separate message."""
    given = read_list(body, "messages", most=MOST_MESSAGES)
    if not given:
        raise BadField("messages", f"messages: expected a list of at least one message, found {brief(given)}")
    found: list[Message] = []
    order = Order()
    system = joined_text(body.get("system"), "system")
    if system:
        found.append({"role": "system", "content": system})
    for k, message in enumerate(given):
        where = f"messages[{k}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise BadField(
                "messages.role", f"{where}: expected an object with the role user or assistant, found {brief(message)}"
            )
        _MESSAGE.check(message, where=where)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise BadField("messages.content", f"{where}.content: expected text or blocks, found {brief(content)}")
        if len(blocks) > MOST_MESSAGES:
            raise BadField("messages.content", f"{where}.content: more than {MOST_MESSAGES} blocks")
        if message["role"] == "assistant":
            found.append(_assistant(blocks, f"{where}.content"))
            order.turn(calls="tool_calls" in found[-1])
        else:
            found += _user_messages(blocks, message["role"], f"{where}.content", order)
    refuse_begun(found[-1]["role"], "messages", f"messages[{len(given) - 1}]")
    return tuple(found)


def _user_messages(blocks: Sequence[dict[str, Any]], role: str, where: str, order: Order) -> list[Message]:
    """Convert one user or system message: each tool result becomes a tool message, followed by the text."""
    found: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result" and role == "user":
            order.result("messages.content", where)
            content = joined_text(block.get("content"), f"{where}.content")
            found.append(
                {
                    "role": "tool",
                    "content": content,
                    "tool_call_id": text_of(block.get("tool_use_id"), f"{where}.tool_use_id"),
                }
            )
            continue
        text = joined_text([block], where)
        order.said(role, where)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += text
        else:
            found.append({"role": role, "content": text})
    if not found:  # a message without blocks becomes an empty message in the prompt
        order.said(role, where)
    return found or [{"role": role, "content": ""}]


def _assistant(blocks: Sequence[dict[str, Any]], where: str) -> Message:
    """Build an assistant message from its blocks: thinking, text and tool calls."""
    texts, thoughts, calls = list[str](), list[str](), list[MessageToolCall]()
    for block in blocks:
        if block.get("type") == "thinking":
            thoughts.append(text_of(block.get("thinking"), f"{where}.thinking"))
        elif block.get("type") == "tool_use":
            given = object_of(block.get("input"), f"{where}.input")
            # Reverses `anthropic_form.call_block`, so that a malformed call is rendered exactly as it was sampled.
            arguments = given[UNREADABLE] if list(given) == [UNREADABLE] else given
            calls.append(call_of(block.get("name"), arguments, block.get("id"), where))
        else:
            texts.append(joined_text([block], where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return cast(Message, message)


def _read_tool(value: object, where: str) -> dict[str, Any]:
    tool = object_of(value, where)
    if tool.get("type", "custom") not in ("custom", None):
        raise BadField(
            "tools",
            f"{where}: a tool of type {brief(tool['type'])} is not available here; only tools with an "
            "input_schema, which the client runs, are accepted",
        )
    _TOOL.check(tool, where=where)
    named = {"name": "name", "description": "description", "parameters": "input_schema"}
    return function_tool({key: tool[theirs] for key, theirs in named.items() if theirs in tool}, where)


def _read_tool_choice(given: Mapping[str, Any]) -> tuple[ToolChoice, str]:
    choice = as_tool_choice(given.get("type"), _CHOICES)
    return choice, text_of(given.get("name"), "tool_choice.name") if choice == "named" else ""
