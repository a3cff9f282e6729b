"""OpenAI's Responses as pure requests and answers: what is read, refused and written, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_records import cut_streams, events_of, ids_of, replies, same_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from verbatim.core.types import StopReason, ToolCall
from verbatim.inference.chat.fields import BadField
from verbatim.inference.chat.openai_responses import FIELDS, OpenAIResponses
from verbatim.inference.chat.protocol import (
    ChatDelta,
    ChatReply,
    ChatRequest,
    Options,
    RequestedSampling,
    Stamp,
)

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
STAMP = Stamp(id="7f", created=12, model="policy")
EVENT = TypeAdapter(ResponseStreamEvent)


def read(options: Options | None = None, headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    return OpenAIResponses(options or Options()).read({"input": "hi", **fields}, headers or {})


def refused(options: Options | None = None, **fields: Any) -> BadField:
    with pytest.raises(BadField) as found:
        read(options, **fields)
    body = OpenAIResponses().error(found.value.status, found.value.message, found.value.field)
    assert body["error"]["message"] == found.value.message
    return found.value


def test_every_honoured_field_reaches_the_request():
    request = read(
        model="m",
        instructions="be brief",
        tools=[ADD],
        tool_choice="none",
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=9,
        stream=True,
        metadata={"a": "b"},
        verbatim={"session": "s", "seed": 3},
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
        reasoning={"summary": "auto"},
        store=True,
        stream_options={"include_obfuscation": False},
    )
    assert request == ChatRequest(
        protocol="openai_responses",
        model="m",
        messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
        tools=({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},),
        tool_choice="none",
        parallel_tool_calls=False,
        stream=True,
        include_usage=True,
        session="s",
        sampling=RequestedSampling(temperature=0.5, top_p=0.25, max_tokens=9, seed=3),
        echo={
            "instructions": "be brief",
            "tools": [ADD],
            "tool_choice": "none",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "top_p": 0.25,
            "max_output_tokens": 9,
            "text": {"format": {"type": "text"}},
            "reasoning": {"summary": "auto"},
        },
    )


def test_fields_without_effect_are_accepted():
    quiet = {name: "x" for name in FIELDS.without_effect}
    off = {name: values[0] for name, values in FIELDS.neutral.items() if values}
    found = read(**quiet, **off, previous_response_id=None)
    assert (found.messages, found.sampling, found.unenforced) == (read().messages, read().sampling, ())


def test_items_of_one_turn_are_one_message():
    request = read(
        input=[
            {
                "role": "developer",
                "content": [{"type": "input_text", "text": "be "}, {"type": "input_text", "text": "good"}],
            },
            {"type": "message", "role": "user", "content": "add"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "phase": "commentary",
                "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "f", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bad"}]},
            {"type": "function_call", "call_id": "c3", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3", "output": ""},
            {"type": "message", "role": "assistant", "content": "one"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "then"}], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": "two"},
            {"type": "message", "role": "user", "content": "so?"},
        ]
    )
    assert list(request.messages) == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a'}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "bad", "tool_call_id": "c2"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "now", "arguments": {}}}],
        },
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "then"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored here"),
        ({"conversation": "c"}, "conversation", "cannot be honoured"),
        ({"background": True}, "background", "only False"),
        ({"truncation": "auto"}, "truncation", "only 'disabled'"),
        ({"max_tool_calls": 3}, "max_tool_calls", "max_tool_calls"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "only {'type': 'text'}"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "only 'medium'"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "effort"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}]},
            "tools.format",
            "without a grammar",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}]},
            "tools",
            "'namespace'",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [ADD]}, {**ADD, "name": "n__add"}]},
            "tools",
            "two of them would have the function name 'n__add'",
        ),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools.defer_loading", "only False"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "'add'"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "expected auto, none"),
        ({"logit_bias": {"1": 2}}, "other", "logit_bias"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 3}, "input", "expected a list"),
        ({"input": ["x"]}, "input", "input[0]: expected an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role = 'tool'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "messages.content",
            "input[0].content: only text",
        ),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}", "mood": 1}]}, "other", "input[0].mood"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.call_id", "expected a string"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(fields, name, said):
    refusal = refused(**fields)
    assert said in refusal.message
    assert refusal.counted_as == name


def test_a_server_may_let_named_fields_pass():
    options = Options(unenforced=frozenset({"other_tools", "reasoning_effort", "truncation", "verbosity"}))
    request = read(
        options,
        tools=[{"type": "web_search"}, ADD],
        reasoning={"effort": "low"},
        truncation="auto",
        text={"verbosity": "low"},
    )
    assert sorted(request.unenforced) == ["effort", "other_tools", "truncation", "verbosity"]
    assert [tool["function"]["name"] for tool in request.tools] == ["add"]


# ---- tools of other forms


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "wait", "description": "Wait.", "parameters": {"type": "object"}, "strict": False},
        {"type": "function", "name": "close", "parameters": {"type": "object"}},
        PATCH,
    ],
}
ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def test_a_template_is_shown_functions_in_the_place_of_custom_tools_and_namespaces():
    request = read(tools=[ADD, PATCH, AGENTS], tool_choice="auto")
    assert [tool["function"] for tool in request.tools] == [
        {"name": "add", "parameters": {"type": "object"}},
        {"name": "patch", "description": "Change files.", "parameters": ONE_TEXT},
        {"name": "agents__wait", "description": "Other agents.\n\nWait.", "parameters": {"type": "object"}},
        {"name": "agents__close", "parameters": {"type": "object"}},
        {"name": "agents__patch", "description": "Change files.", "parameters": ONE_TEXT},
    ]
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    request = read(Options(unenforced=frozenset({"tool_grammar"})), tools=[{**PATCH, "format": lark}])
    assert request.unenforced == ("tool_grammar",)
    assert request.tools[0]["function"]["description"] == (
        "Change files.\n\nThe input follows this lark grammar:\nstart: /a/"
    )


CALLS = (
    ToolCall(name="patch", arguments={"input": "+ö"}, raw="", id="c1"),
    ToolCall(name="agents__wait", arguments={"s": 1}, raw="", id="c2"),
    ToolCall(name="agents__patch", arguments={"input": ""}, raw="", id="c3"),
    ToolCall(name="patch", arguments={"file": "a"}, raw="", id="c4"),
    ToolCall(name="patch", arguments=None, status="invalid_json", raw='{"inp', id="c5"),
)


def test_calls_of_custom_tools_and_of_namespaces_are_answered_in_their_form_and_read_again():
    request = read(tools=[PATCH, AGENTS])
    reply = ChatReply(content="", tool_calls=CALLS, ids=ids_of(1))
    answer = OpenAIResponses().answer(request, [reply], STAMP)
    done = {"type": "function_call", "status": "completed"}
    assert answer["output"] == [
        {"id": "ctc_7f_0", "type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+ö"},
        {**done, "id": "fc_7f_1", "call_id": "c2", "name": "wait", "namespace": "agents", "arguments": '{"s": 1}'},
        {
            "id": "ctc_7f_2",
            "type": "custom_tool_call",
            "call_id": "c3",
            "name": "patch",
            "namespace": "agents",
            "input": "",
        },
        {**done, "id": "fc_7f_3", "call_id": "c4", "name": "patch", "arguments": '{"file": "a"}'},
        {**done, "id": "fc_7f_4", "call_id": "c5", "name": "patch", "arguments": '{"inp'},
    ]
    Response.model_validate(answer, strict=True)
    results = [
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "ok"},
    ]
    again = read(tools=[PATCH, AGENTS], input=[{"role": "user", "content": "hi"}, *answer["output"], *results])
    assert again.messages[1] == reply.message
    assert again.messages[2:] == (
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "tool", "content": "ok", "tool_call_id": "c2"},
    )


def test_a_stream_of_such_calls_joins_to_the_whole_answer():
    request = read(tools=[PATCH, AGENTS])
    reply = ChatReply(content="", tool_calls=CALLS, ids=ids_of(1))
    stream = OpenAIResponses().stream(request, STAMP)
    events = [event for _, event in events_of(stream.begin(3) + stream.end([reply]))]
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert joined(events) == OpenAIResponses().answer(request, [reply], STAMP)["output"]


# ---- answers


def test_a_whole_answer():
    call = ToolCall(name="add", arguments={"a": "ö"}, raw="", id="c1")
    reply = ChatReply(
        content="so",
        reasoning_content="hm",
        tool_calls=(call,),
        ids=ids_of(4, 5),
        num_prompt_tokens=5,
        num_cached_tokens=2,
    )
    answer = OpenAIResponses().answer(read(tools=[ADD], metadata={"a": "b"}), [reply], STAMP)
    assert (answer["id"], answer["status"], answer["created_at"], answer["tools"]) == (
        "resp_7f",
        "completed",
        12,
        [ADD],
    )
    assert answer["output"] == [
        {
            "id": "rs_7f",
            "type": "reasoning",
            "summary": [],
            "encrypted_content": None,
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "id": "msg_7f",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_7f_0",
            "type": "function_call",
            "call_id": "c1",
            "name": "add",
            "arguments": '{"a": "ö"}',
            "status": "completed",
        },
    ]
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert Response.model_validate(answer, strict=True).output_text == "so"


def test_a_reply_that_was_cut_off_is_incomplete():
    reply = ChatReply(content="so", ids=ids_of(1), stop_reason=StopReason.LENGTH)
    answer = OpenAIResponses().answer(read(), [reply], STAMP)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert events_of(OpenAIResponses().stream(read(), STAMP).end([reply]))[-1][0] == "response.incomplete"


@settings(max_examples=50)
@given(replies())
def test_what_is_answered_is_read_again_as_the_message_that_it_was(reply):
    answer = OpenAIResponses().answer(read(), [reply], STAMP)
    request = read(input=[{"role": "user", "content": "hi"}, *answer["output"], {"role": "user", "content": "so"}])
    assert len(request.messages) == 3
    wanted, found = dict(reply.message), dict(request.messages[1])
    if not wanted.get("reasoning_content"):
        wanted.pop("reasoning_content", None)
    expected = [call["function"]["arguments"] for call in wanted.pop("tool_calls", ())]
    given_back = [call["function"]["arguments"] for call in found.pop("tool_calls", ())]
    assert found == wanted
    assert all(map(same_arguments, given_back, expected)) and len(given_back) == len(expected)


# ---- streams


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together from the deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(json.loads(json.dumps(event["item"])))
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(dict(event["part"]))
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                items[event["output_index"]].update({k: v for k, v in event["item"].items() if k == "status"})
                assert items[event["output_index"]] == event["item"]
    return items


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), replies())
def test_a_stream_cut_anywhere_joins_to_the_whole_answer(data, reply):
    raw = data.draw(cut_streams(OpenAIResponses().stream(read(tools=[ADD]), STAMP), reply))
    named = events_of(raw)
    events = [event for _, event in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    whole = OpenAIResponses().answer(read(tools=[ADD]), [reply], STAMP)
    Response.model_validate(whole, strict=True)
    assert events[-1]["response"] == whole
    assert joined(events) == whole["output"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"


def test_thinking_text_and_calls_are_items_one_after_the_other():
    call = ToolCall(name="add", arguments={}, id="c")
    reply = ChatReply(content="so", reasoning_content="hm", tool_calls=(call,), ids=ids_of(1))
    stream = OpenAIResponses().stream(read(), STAMP)
    raw = stream.begin(3) + stream.delta(ChatDelta(reasoning="h")) + stream.end([reply])
    assert [name for name, _ in events_of(raw)] == [
        f"response.{name}"
        for name in (
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        )
    ]


def test_an_error_fails_the_response():
    ((name, event),) = events_of(OpenAIResponses().stream(read(), STAMP).error(503, "the engine died"))
    EVENT.validate_python(event, strict=True)
    assert (name, event["response"]["error"]["message"]) == ("response.failed", "the engine died")
