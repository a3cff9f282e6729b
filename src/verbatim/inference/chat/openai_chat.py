"""OpenAI's chat-completions protocol with vLLM's additions: reads requests and writes responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from verbatim.core.texts import brief
from verbatim.core.types import Message
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.fields import (
    MOST_MESSAGES,
    MOST_TOOLS,
    BadField,
    Fields,
    object_of,
    read_flag,
    read_integer,
    read_list,
    read_object,
    read_stops,
    read_tool_choice,
    text_of,
)
from verbatim.inference.chat.messages import Order, call_of, function_tool, joined_text, refuse_begun
from verbatim.inference.chat.openai_chat_stream import OpenAIChatStream
from verbatim.inference.chat.openai_form import choice_body, usage_of
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp
from verbatim.inference.http.protocol import OURS

FIELDS = Fields(
    honoured={
        "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p",
        "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n", "logprobs",
        "stream", "stream_options", "return_token_ids", OURS,
    },
    without_effect={
        "user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "cache_salt", "request_id", "priority", "skip_special_tokens",
        "spaces_between_special_tokens", "cache_control",
    },
    neutral={
        "response_format": ({"type": "text"},), "reasoning_effort": (), "verbosity": ("medium",),
        "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0),
        "logit_bias": ({},), "top_logprobs": (0,), "store": (False,), "modalities": (["text"],), "audio": (),
        "prediction": (), "web_search_options": (), "functions": ([],), "function_call": (), "moderation": (),
        "best_of": (1,), "min_tokens": (0,), "bad_words": ([],), "prompt_logprobs": (), "echo": (False,),
        "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template_kwargs": ({},),
        "include_stop_str_in_output": (False,), "include_reasoning": (True,),
    },
)  # fmt: skip
"""How each field of a request is treated."""
_MESSAGE = Fields(
    honoured={"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"},
    without_effect={
        "id",
        "status",
        "annotations",
        "cache_control",
        "provider_specific_fields",
        "thinking_blocks",
        "reasoning_details",
    },
    neutral={"refusal": (), "audio": (), "function_call": ()},
)
_ASSISTANT_FIELDS = ("tool_calls", "reasoning_content", "reasoning")
_CALL = Fields(
    honoured={"id", "type", "function"},
    without_effect={"index", "provider_specific_fields", "extra_content", "cache_control"},
)
_STREAM_OPTIONS = Fields(honoured={"include_usage"}, without_effect={"include_obfuscation", "continuous_usage_stats"})
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Maps roles in the protocol to roles in chat templates."""


class OpenAIChat(ChatProtocol):
    """OpenAI's chat completions: `POST /v1/chat/completions`."""

    name, fields, max_tokens = "openai_chat", FIELDS, ("max_completion_tokens", "max_tokens")

    def read_own(self, body: Mapping[str, Any]) -> ChatRequest:
        """See `ChatProtocol.read_own`."""
        given = read_list(body, "tools", most=MOST_TOOLS)
        choice, name = read_tool_choice(body.get("tool_choice"), _named)
        stream_options = read_object(body, "stream_options")
        _STREAM_OPTIONS.check(stream_options, where="stream_options")
        messages, unenforced = _read_messages(body), tuple[str, ...]()
        if "name" in self.options.unenforced and any(map(_has_speaker, messages)):
            messages, unenforced = tuple(map(_without_name, messages)), ("name",)
        return ChatRequest(
            protocol=self.name,
            messages=messages,
            tools=tuple(_read_tool(tool, f"tools[{k}]") for k, tool in enumerate(given)),
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
            stop=read_stops(body, "stop"),
            n=read_integer(body, "n", least=1, most=self.options.max_n) or 1,
            include_usage=read_flag(stream_options, "include_usage"),
            include_logprobs=read_flag(body, "logprobs"),
            include_token_ids=read_flag(body, "return_token_ids"),
            unenforced=unenforced,
        )

    def answer(self, request: ChatRequest, replies: Sequence[ChatReply], stamp: Stamp) -> dict[str, Any]:
        """The body of a non-streamed response."""
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{stamp.id}",
            "object": "chat.completion",
            "created": stamp.created,
            "model": stamp.model,
            "choices": [choice_body(request, reply, index) for index, reply in enumerate(replies)],
            "usage": usage_of(replies),
        }
        if request.include_token_ids and replies[0].prompt_ids is not None:
            answer["prompt_token_ids"] = replies[0].prompt_ids.tolist()
        # With a single reply, our additions are at the top level, as in responses of the token endpoint.
        if len(replies) == 1 and OURS in answer["choices"][0]:
            answer[OURS] = answer["choices"][0].pop(OURS)
        return answer

    def stream(self, request: ChatRequest, stamp: Stamp) -> OpenAIChatStream:
        """The writer of a streamed response."""
        return OpenAIChatStream(request, stamp)


def _read_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    given = read_list(body, "messages", most=MOST_MESSAGES)
    if not given:
        raise BadField(
            "messages", f"messages: expected a list of at least one message, found {brief(body.get('messages'))}"
        )
    order, found = Order(), list[Message]()
    for k, value in enumerate(given):
        message = _read_message(value, f"messages[{k}]")
        order.note(message, "messages", f"messages[{k}]")
        found.append(message)
    refuse_begun(found[-1]["role"], "messages", f"messages[{len(found) - 1}]")
    return tuple(found)


def _read_message(value: object, where: str) -> Message:
    """Convert one message to canonical form."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise BadField("messages", f"{where}: expected an object with a role, found {brief(value)}")
    _MESSAGE.check(value, where=where)
    role = _ROLES.get(value["role"])
    if role is None:
        raise BadField("messages.role", f"{where}.role = {brief(value['role'])}; expected one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": role, "content": joined_text(value.get("content"), f"{where}.content")}
    if value.get("name") is not None:
        message["name"] = text_of(value["name"], f"{where}.name")
    if role == "assistant":
        given = [value[name] for name in ("reasoning_content", "reasoning") if value.get(name) is not None]
        if given:
            reasoning = next(filter(None, given), given[0])  # some clients send both fields, one of them empty
            message["reasoning_content"] = text_of(reasoning, f"{where}.reasoning_content")
        calls = read_list(value, "tool_calls", most=MOST_TOOLS) if value.get("tool_calls") is not None else []
        if calls:
            message["tool_calls"] = [_read_call(call, f"{where}.tool_calls") for call in calls]
    elif key := next((name for name in _ASSISTANT_FIELDS if value.get(name)), None):
        raise BadField(
            f"messages.{key}", f"{where}.{key}: only an assistant message may have this field; the role is {role}"
        )
    if role == "tool" and value.get("tool_call_id") is not None:
        message["tool_call_id"] = text_of(value["tool_call_id"], f"{where}.tool_call_id")
    return cast(Message, message)


def _has_speaker(message: Message) -> bool:
    """True if the message names its speaker. The `name` of a tool message is the name of the function, not of a
    speaker."""
    return message["role"] != "tool" and "name" in message


def _without_name(message: Message) -> Message:
    fields = {key: value for key, value in message.items() if key != "name"}
    return cast(Message, fields) if _has_speaker(message) else message


def _read_call(value: object, where: str) -> Any:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField("messages.tool_calls", f"{where}: expected calls of functions, found {brief(value)}")
    _CALL.check(value, where=where)
    return call_of(function["name"], function.get("arguments"), value.get("id"), where)


def _read_tool(value: Any, where: str) -> dict[str, Any]:
    is_function = isinstance(value, dict) and value.get("type", "function") == "function"
    if not is_function or not isinstance(value.get("function"), dict):
        raise BadField("tools", f"tools: expected functions with a name, found {brief(value)}")
    return function_tool(value["function"], where)


def _named(choice: Mapping[str, Any]) -> str | None:
    """Name of the function in a `tool_choice`; None if it does not name a function."""
    if choice.get("type") != "function":
        return None
    function = object_of(choice.get("function"), "tool_choice.function")
    return text_of(function.get("name"), "tool_choice.function.name")
