"""Anthropic's Messages as pure requests and answers: what is read, refused and written, whole and streamed."""

from __future__ import annotations

import doctest
import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from chat_records import cut_streams, events_of, ids_of, replies, same_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from verbatim.core.types import StopReason, ToolCall
from verbatim.inference.chat import anthropic_form
from verbatim.inference.chat.anthropic_messages import FIELDS, AnthropicMessages
from verbatim.inference.chat.fields import BadField
from verbatim.inference.chat.protocol import (
    ChatDelta,
    ChatReply,
    ChatRequest,
    Options,
    RequestedSampling,
    Stamp,
)

HELLO = [{"role": "user", "content": "hi"}]
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
STAMP = Stamp(id="7f", created=12, model="policy")
EVENT = TypeAdapter(RawMessageStreamEvent)


def read(options: Options | None = None, headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    body = {"max_tokens": 9, "messages": HELLO, **fields}
    return AnthropicMessages(options or Options()).read(body, headers or {})


def refused(options: Options | None = None, **fields: Any) -> BadField:
    with pytest.raises(BadField) as found:
        read(options, **fields)
    refusal = found.value
    assert AnthropicMessages().error(refusal.status, refusal.message, refusal.field) == {
        "type": "error",
        "request_id": None,
        "error": {"type": "invalid_request_error", "message": refusal.message},
    }
    return refusal


def test_examples_are_true():
    assert doctest.testmod(anthropic_form).failed == 0


def test_every_honoured_field_reaches_the_request():
    request = read(
        model="m",
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "brief", "cache_control": {}}],
        tools=[ADD],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        stop_sequences=["a", "b"],
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 1024},
        verbatim={"session": "s", "seed": 4},
    )
    assert request == ChatRequest(
        protocol="anthropic_messages",
        model="m",
        messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
        tools=(
            {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}},
        ),
        parallel_tool_calls=False,
        sampling=RequestedSampling(temperature=0.5, top_p=0.25, top_k=3, max_tokens=9, seed=4),
        stop=("a", "b"),
        stream=True,
        include_usage=True,
        session="s",
    )


def test_fields_without_effect_are_accepted():
    quiet = {name: {} for name in FIELDS.without_effect}
    off = {name: values[0] for name, values in FIELDS.neutral.items() if values}
    assert read(**quiet, **off, output_config={}, thinking={"type": "adaptive"}, container=None) == read()


def test_blocks_become_messages_in_their_order():
    request = read(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "add "}, {"type": "text", "text": "it"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"b": 1, "a": [2]}},
                    {"type": "tool_use", "id": "c2", "name": "add", "input": {"unreadable_arguments": '{"b": '}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    {"type": "text", "text": "and"},
                    {"type": "text", "text": "?"},
                ],
            },
        ]
    )
    assert list(request.messages) == [
        {"role": "user", "content": "add it"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": [2]}}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"b": '}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "expected the maximum number of tokens"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"stop_sequences": "x" * 300}, "stop_sequences", "at most 256"),
        ({"thinking": {"type": "disabled"}}, "thinking", "chat template"),
        ({"thinking": {"type": "deep"}}, "thinking", "thinking.type = 'deep'"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display", "only 'summarized'"),
        ({"output_config": {"effort": "low"}}, "output_config.effort", "effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format", "format"),
        ({"context_management": {"edits": []}}, "context_management", "cannot be honoured"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "only []"),
        ({"logit_bias": {}}, "other", "logit_bias"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "bash_20250124"),
        ({"tools": [{"name": "x", "input_schema": {}, "defer_loading": True}]}, "tools.defer_loading", "only False"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools", "functions with a name"),
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice", "cannot be forced"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", "'add'"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice.name", "expected a string"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.role", "the role user or assistant"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "so"}]}, "messages", "end with a user message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.content",
            "messages[0].content: only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages.content.tool_use_id",
            "expected a string",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": "{}"}]},
                    *HELLO,
                ]
            },
            "messages.content.input",
            "expected an object",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(fields, name, said):
    refusal = refused(**fields)
    assert said in refusal.message
    assert refusal.counted_as == name


def test_a_server_may_let_named_fields_pass():
    options = Options(unenforced=frozenset({"thinking", "reasoning_effort", "context_management", "tool_choice"}))
    request = read(
        options,
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        tools=[ADD],
        context_management={"edits": []},
        tool_choice={"type": "any"},
    )
    assert sorted(request.unenforced) == ["context_management", "effort", "thinking", "tool_choice"]


def test_a_count_needs_no_limit():
    protocol = AnthropicMessages(needs_limit=False)
    assert protocol.read({"messages": HELLO}, {}).messages == read().messages
    assert protocol.count(5) == {"input_tokens": 5}


# ---- answers


def test_a_whole_answer():
    call = ToolCall(name="add", arguments={"a": "ö"}, raw="", id="c1")
    broken = ToolCall(name=None, arguments=None, status="invalid_json", raw='{"a', id="c2")
    reply = ChatReply(
        content="so",
        reasoning_content="hm",
        tool_calls=(call, broken),
        ids=ids_of(4, 5),
        num_prompt_tokens=5,
        num_cached_tokens=2,
    )
    assert AnthropicMessages().answer(read(), [reply], STAMP) == {
        "id": "msg_7f",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "verbatim"},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": "ö"}},
            {"type": "tool_use", "id": "c2", "name": "", "input": {"unreadable_arguments": '{"a'}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 2,
        },
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "end_turn"),
        ({"stop_string": "x"}, "stop_sequence"),
        ({"stop_reason": StopReason.LENGTH}, "max_tokens"),
        ({"tool_calls": (ToolCall(name="a", arguments={}),)}, "tool_use"),
    ],
)
def test_an_answer_says_why_it_ended(fields, reason):
    answer = AnthropicMessages().answer(read(), [ChatReply(content="a", ids=ids_of(1), **fields)], STAMP)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, fields.get("stop_string"))


@settings(max_examples=50)
@given(replies())
def test_what_is_answered_is_read_again_as_the_message_that_it_was(reply):
    answer = AnthropicMessages().answer(read(), [reply], STAMP)
    echoed = {"role": "assistant", "content": answer["content"]}
    request = read(messages=[*HELLO, echoed, *HELLO])
    wanted = reply.message
    if not wanted.get("reasoning_content"):
        wanted.pop("reasoning_content", None)
    expected = [call["function"]["arguments"] for call in wanted.pop("tool_calls", ())]
    found = dict(request.messages[1])
    given = [call["function"]["arguments"] for call in found.pop("tool_calls", ())]
    assert found == wanted
    assert all(map(same_arguments, given, expected)) and len(given) == len(expected)


# ---- streams


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), replies())
def test_a_stream_cut_anywhere_joins_to_the_whole_answer(data, reply):
    raw = data.draw(cut_streams(AnthropicMessages().stream(read(), STAMP), reply))
    snapshot, pieces = None, dict[Any, Any]()
    for name, event in events_of(raw):
        assert name == event["type"]
        if name != "ping":
            EVENT.validate_python(event, strict=True)
            snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=pieces)
    whole = AnthropicMessages().answer(read(), [reply], STAMP)
    Message.model_validate(whole, strict=True)
    assert snapshot is not None
    found = json.loads(snapshot.model_dump_json(exclude_unset=True, exclude={"stop_details"}))
    assert found == whole


def test_events_come_in_the_documented_order():
    call = ToolCall(name="add", arguments={"a": 1}, id="c")
    reply = ChatReply(content="so", reasoning_content="hm", tool_calls=(call,), ids=ids_of(1), num_prompt_tokens=3)
    stream = AnthropicMessages().stream(read(), STAMP)
    raw = stream.begin(3) + stream.delta(ChatDelta(reasoning="hm")) + stream.delta(ChatDelta(content="s"))
    events = events_of(raw + stream.end([reply]))
    assert [(name, event.get("index"), event.get("delta", {}).get("type")) for name, event in events] == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (415, "invalid_request_error"),
    ],
)
def test_errors_have_the_protocols_types(status, kind):
    assert AnthropicMessages().error(status, "no")["error"]["type"] == kind
    ((name, body),) = events_of(AnthropicMessages().stream(read(), STAMP).error(status, "no"))
    assert (name, body["error"]["type"]) == ("error", kind)
