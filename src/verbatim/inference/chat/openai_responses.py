"""OpenAI's Responses protocol, as the SDK and coding agents use it. It is stateless: no response is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.core.texts import brief
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.fields import (
    BadField,
    Fields,
    read_flag,
    read_list,
    read_object,
    read_tool_choice,
)
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp
from verbatim.inference.chat.responses_form import response_body
from verbatim.inference.chat.responses_input import read_input
from verbatim.inference.chat.responses_stream import ResponsesStream
from verbatim.inference.chat.responses_tools import ReadTools, named
from verbatim.inference.http.protocol import OURS

FIELDS = Fields(
    honoured={
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p",
        "max_output_tokens", "stream", "stream_options", "text", "reasoning", "include", "metadata", OURS,
    },
    without_effect={
        "store", "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "client_metadata",
    },
    neutral={
        "previous_response_id": (), "conversation": (), "background": (False,), "prompt": (), "max_tool_calls": (),
        "top_logprobs": (0,), "truncation": ("disabled",), "moderation": (), "context_management": (),
    },
)  # fmt: skip
"""How each field of a request is treated."""
_TEXT = Fields(
    honoured=(),
    neutral={"format": ({"type": "text"},), "verbosity": ("medium",)},
    aliases={"format": "response_format"},
)
_REASONING = Fields(
    honoured=(),
    without_effect={"summary", "generate_summary"},
    neutral={"effort": (), "context": ("auto",), "mode": ("standard",)},
    aliases={"effort": "reasoning_effort"},
)
_STREAM_OPTIONS = Fields(honoured=(), without_effect={"include_obfuscation"})
_INCLUDED = {
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
"""Accepted values of `include`. They have no effect: thinking is always included, unencrypted, and this server never
produces the other contents."""
_ECHOED = ("instructions", "tools", "tool_choice", "metadata", "temperature", "top_p", "max_output_tokens", "text",
           "reasoning", "user", "safety_identifier", "prompt_cache_key")  # fmt: skip


class OpenAIResponses(ChatProtocol):
    """OpenAI's Responses: `POST /v1/responses`."""

    name, fields, max_tokens = "openai_responses", FIELDS, ("max_output_tokens",)

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """See `ChatProtocol.read`."""
        if body.get("previous_response_id") is not None:
            raise BadField(
                "previous_response_id",
                "previous_response_id cannot be honoured: responses are not stored "
                "here; send the whole conversation as input",
            )
        return super().read(body, headers)

    def read_own(self, body: Mapping[str, Any]) -> ChatRequest:
        """See `ChatProtocol.read_own`."""
        unenforced = _TEXT.check(read_object(body, "text"), self.options, "text")
        unenforced += _REASONING.check(read_object(body, "reasoning"), self.options, "reasoning")
        _STREAM_OPTIONS.check(read_object(body, "stream_options"), where="stream_options")
        for wanted in read_list(body, "include", most=100):
            if not isinstance(wanted, str) or wanted not in _INCLUDED:
                raise BadField("include", f"include: {brief(wanted)} cannot be included here")
        read = ReadTools(body, self.options)
        choice, name = read_tool_choice(body.get("tool_choice"), named)
        return ChatRequest(
            protocol=self.name,
            messages=read_input(body),
            tools=tuple(read.tools),
            tool_forms=read.forms,
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
            include_usage=True,
            unenforced=(*unenforced, *read.unenforced),
            echo={name: body[name] for name in _ECHOED if body.get(name) is not None},
        )

    def answer(self, request: ChatRequest, replies: Sequence[ChatReply], stamp: Stamp) -> dict[str, Any]:
        """The body of a non-streamed response."""
        (reply,) = replies
        return response_body(request, stamp, reply)

    def stream(self, request: ChatRequest, stamp: Stamp) -> ResponsesStream:
        """The writer of a streamed response."""
        return ResponsesStream(request, stamp)
