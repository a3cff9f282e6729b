"""OpenAI's chat completions as pure requests and answers: what is read, refused and written, whole and streamed."""

from __future__ import annotations

import doctest
import json
import pickle
from typing import Any

import numpy as np
import pytest
from chat_records import events_of, ids_of, replies
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from verbatim.core.types import StopReason, ToolCall
from verbatim.inference.chat import messages, openai_form, protocol, streaming
from verbatim.inference.chat.fields import BadField
from verbatim.inference.chat.openai_chat import FIELDS, OpenAIChat
from verbatim.inference.chat.protocol import (
    ChatDelta,
    ChatReply,
    ChatRequest,
    Options,
    RequestedSampling,
    Stamp,
)
from verbatim.inference.chat.streaming import StreamDiverged, token_logprobs

HELLO = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
STAMP = Stamp(id="7f", created=12, model="policy")


def read(options: Options | None = None, headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    return OpenAIChat(options or Options()).read({"messages": HELLO, **fields}, headers or {})


def refused(options: Options | None = None, **fields: Any) -> BadField:
    with pytest.raises(BadField) as found:
        read(options, **fields)
    refusal = found.value
    assert refusal.status == 400
    error = OpenAIChat().error(refusal.status, refusal.message, refusal.field)["error"]
    assert error["message"] == refusal.message == str(refusal)
    assert error["type"] == "invalid_request_error"
    return refusal


@pytest.mark.parametrize("module", [messages, openai_form, protocol, streaming])
def test_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


# ---- reading


def test_every_honoured_field_reaches_the_request():
    request = read(
        model="m",
        tools=[ADD],
        tool_choice="auto",
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        max_tokens=9,
        max_completion_tokens=7,
        stop=["a", "", "b", "a"],
        stop_token_ids=[3],
        ignore_eos=True,
        seed=-4,
        n=3,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        verbatim={"session": "s"},
    )
    assert request == ChatRequest(
        protocol="openai_chat",
        model="m",
        messages=({"role": "user", "content": "hi"},),
        tools=({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},),
        parallel_tool_calls=False,
        sampling=RequestedSampling(
            temperature=0.5,
            top_p=0.25,
            top_k=0,
            min_p=0.125,
            max_tokens=7,
            seed=-4,
            stop_token_ids=(3,),
            ignore_eos=True,
        ),
        stop=("a", "b"),
        n=3,
        stream=True,
        include_usage=True,
        include_logprobs=True,
        include_token_ids=True,
        session="s",
    )


def test_what_is_not_given_stays_open_for_the_servers_defaults():
    assert read().sampling == RequestedSampling()
    assert read(temperature=None, stop=None, n=None, tools=None, stream=None) == read()


def test_null_and_fields_without_effect_are_accepted():
    quiet = {name: "x" for name in FIELDS.without_effect}
    assert read(**quiet, logit_bias=None, response_format=None, no_such=None) == read()
    off = {name: values[0] for name, values in FIELDS.neutral.items() if values}
    assert read(**off) == read()


def test_a_conversation_becomes_canonical_messages():
    request = read(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "add", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "reasoning": "hm",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "add", "arguments": '{"b": 1, "a": [2]}'},
                    },
                    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"b": '}},
                    {"id": "c3", "type": "function", "function": {"name": "now", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
        ]
    )
    assert list(request.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": [2]}}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"b": '}},
                {"id": "c3", "type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"reasoning_content": "", "reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm", "reasoning": ""}, "hm"),
        ({"reasoning": ""}, ""),
        ({"reasoning_content": None, "reasoning": "hm"}, "hm"),
    ],
)
def test_a_thought_is_read_under_either_name(given, read):
    body = {"messages": [{"role": "assistant", "content": "so", **given}, {"role": "user", "content": "and?"}]}
    assert OpenAIChat().read(body, {}).messages[0]["reasoning_content"] == read


def test_a_session_comes_from_the_body_or_the_header():
    assert read(headers={"x-session-id": "a" * 2000}).session == "a" * 1024
    assert read(headers={"x-session-id": "a"}, verbatim={"session": "b", "seed": 9}).session == "b"
    assert read(verbatim={"seed": 9}, seed=3).sampling.seed == 9


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias", "only {} is accepted"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty = 0.5"),
        ({"response_format": {"type": "json_object"}}, "response_format", "only {'type': 'text'} is accepted"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "cannot be honoured"),
        ({"top_logprobs": 3}, "top_logprobs", "only 0"),
        ({"store": True}, "store", "only False"),
        ({"store": 0}, "store", "store = 0"),
        ({"functions": [{"name": "add"}]}, "functions", "functions"),
        ({"stop": ["a" * 257]}, "stop", "at most 256 characters"),
        ({"stop": ["a"] * 17}, "stop", "17 entries; at most 16"),
        ({"stop": ["\ufffd"]}, "stop", "stands for invalid bytes"),
        ({"stop": 3}, "stop", "expected a list"),
        ({"n": 0}, "n", "n = 0; expected an integer from 1 to 64"),
        ({"n": 65}, "n", "from 1 to 64"),
        ({"n": True}, "n", "n = True"),
        ({"stream": "yes"}, "stream", "expected true or false"),
        ({"stream_options": {"include_cost": True}}, "other", "stream_options.include_cost"),
        ({"temperature": -1}, "temperature", "temperature = -1"),
        ({"temperature": "hot"}, "temperature", "expected a number"),
        ({"temperature": 10**400}, "temperature", "expected a number"),
        ({"top_p": 0}, "top_p", "top_p = 0.0; expected in [1e-30, 1]"),
        ({"seed": 2**63}, "seed", "seed"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens = 0"),
        ({"max_tokens": 1.5}, "max_tokens", "expected an integer"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "token ids"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "expected functions"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "expected functions with a name"),
        ({"tools": [ADD] * 1025}, "tools", "at most 1024"),
        ({"tools": 3}, "tools", "expected a list"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice", "cannot be forced"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [ADD]}, "tool_choice", "'add'"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [ADD]}, "tool_choice", "not one"),
        ({"tool_choice": "any"}, "tool_choice", "expected one of auto, none, required"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.role", "messages[0].role = 'critic'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.content",
            "messages[0].content: only text is accepted",
        ),
        ({"messages": [{"role": "user", "content": "x", "tone": "rude"}]}, "other", "messages[0].tone"),
        ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages.refusal", "refusal"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "c"}]}]},
            "messages.tool_calls",
            "messages[0].tool_calls: only an assistant message may have this field; the role is user",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages.tool_call_id", "a string"),
        ({"no_such": 1}, "other", "no_such = 1 is not a field that this server knows"),
        ({"verbatim": {"x": 1}}, "other", "verbatim.x"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(fields, name, said):
    refusal = refused(**fields)
    assert said in refusal.message
    assert refusal.counted_as == name
    copy = pickle.loads(pickle.dumps(refusal))  # noqa: S301
    assert (copy.status, copy.message, copy.field) == (400, refusal.message, refusal.field)
    assert copy.counted_as == refusal.counted_as


def test_a_body_that_is_too_deep_is_refused():
    value: Any = {}
    for _ in range(100):
        value = {"a": value}
    assert refused(metadata=value).message == ("metadata is nested deeper than 64 levels, at metadata.a.a.a.a.a")
    assert refused(metadata={"a": [float("inf")]}).message == "metadata contains a number that is too large"


def test_a_server_may_let_named_fields_pass_and_says_which():
    options = Options(unenforced=frozenset({"tool_choice", "response_format", "reasoning_effort"}))
    request = read(options, tools=[ADD], tool_choice="required", response_format={"type": "json_object"})
    assert (request.tool_choice, sorted(request.unenforced)) == ("required", ["response_format", "tool_choice"])
    assert "only 0" in refused(options, top_logprobs=1).message
    assert "no tools" in refused(options, tool_choice="required").message


def test_what_a_server_lets_pass_is_known():
    with pytest.raises(ValueError, match="seed; expected some of"):
        Options(unenforced=frozenset({"seed"}))


def test_a_field_has_one_meaning():
    parts = [set(FIELDS.honoured), set(FIELDS.without_effect), set(FIELDS.neutral)]
    assert sum(map(len, parts)) == len(set().union(*parts))


# ---- answers


def say(content: str, *tokens: int, **fields: Any) -> ChatReply:
    return ChatReply(content=content, ids=ids_of(*tokens), num_prompt_tokens=5, **fields)


def test_a_whole_answer():
    call = ToolCall(name="add", arguments={"a": "ö"}, raw='{"a":"ö"}', id="c1")
    broken = ToolCall(name=None, arguments=None, status="invalid_json", raw='{"a', id="c2")
    reply = say(
        "",
        4,
        5,
        reasoning_content="hm",
        tool_calls=(call, broken),
        prompt_ids=ids_of(1, 2),
        seed=8,
        logprobs=np.array([-0.5, -0.25], np.float32),
        token_texts=("x", "ö"),
        policy_versions=ids_of(3, 3),
    )
    answer = OpenAIChat().answer(read(logprobs=True, return_token_ids=True), [reply], STAMP)
    assert answer == {
        "id": "chatcmpl-7f",
        "object": "chat.completion",
        "created": 12,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "token_ids": [4, 5],
                "message": {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "ö"}'}},
                        {"id": "c2", "type": "function", "function": {"name": "", "arguments": '{"a'}},
                    ],
                },
                "logprobs": {
                    "content": [
                        {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []},
                        {"token": "ö", "logprob": -0.25, "bytes": [195, 182], "top_logprobs": []},
                    ]
                },
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        "verbatim": {"seed": 8, "policy_versions": [3, 3]},
        "prompt_token_ids": [1, 2],
    }


def test_several_replies_share_the_prompt():
    answer = OpenAIChat().answer(read(n=2), [say("a", 1, num_cached_tokens=4), say("b", 2, 3)], STAMP)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b"]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({}, "stop"),
        ({"stop_string": "x"}, "stop"),
        ({"stop_reason": StopReason.LENGTH}, "length"),
        ({"stop_reason": StopReason.LENGTH, "tool_calls": (ToolCall(name="a", arguments={}),)}, "length"),
        ({"tool_calls": (ToolCall(name="a", arguments={}),)}, "tool_calls"),
    ],
)
def test_an_answer_says_why_it_ended(fields, finish):
    (choice,) = OpenAIChat().answer(read(), [say("a", 1, **fields)], STAMP)["choices"]
    assert (choice["finish_reason"], choice.get("stop_reason")) == (finish, fields.get("stop_string"))


# ---- streams


def joined(chunks: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The choices that a client puts together."""
    found = [{"content": "", "reasoning": None, "calls": {}, "tokens": [], "finish": None} for _ in range(n)]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one, delta = found[choice["index"]], choice["delta"]
        assert one["finish"] is None, "nothing comes behind the end"
        one["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            one["reasoning"] = (one["reasoning"] or "") + delta["reasoning_content"]
        for part in delta.get("tool_calls", ()):
            call = one["calls"].setdefault(part["index"], {"id": None, "name": "", "arguments": ""})
            call["id"] = part.get("id", call["id"])
            call["name"] += part["function"].get("name", "")
            call["arguments"] += part["function"]["arguments"]
        one["tokens"] += (choice["logprobs"] or {}).get("content", [])
        one["finish"] = choice["finish_reason"]
    return found


@st.composite
def streamed(draw: st.DrawFn) -> tuple[list[ChatReply], bool, bytes]:
    """Replies, whether counts are wanted, and their stream, cut anywhere and in any order of the choices."""
    said, usage = draw(st.lists(replies(), min_size=1, max_size=3)), draw(st.booleans())
    request = read(n=len(said), stream=True, stream_options={"include_usage": usage}, logprobs=True)
    stream = OpenAIChat().stream(request, STAMP)
    events, places = stream.begin(5), [(0, 0, 0)] * len(said)
    for index in draw(st.lists(st.integers(0, len(said) - 1), max_size=6)):
        reply, old = said[index], places[index]
        sizes = (len(reply.reasoning_content or ""), len(reply.content), len(reply.token_texts))
        new = tuple(draw(st.integers(a, b)) for a, b in zip(old, sizes, strict=True))
        if new[1] > 0:
            new = (sizes[0], *new[1:])  # thinking comes first
        events += stream.ping if draw(st.booleans()) else b""
        events += stream.delta(
            ChatDelta(
                index=index,
                reasoning=(reply.reasoning_content or "")[old[0] : new[0]],
                content=reply.content[old[1] : new[1]],
                tokens=token_logprobs(reply)[old[2] : new[2]],
            )
        )
        places[index] = new
    return said, usage, events + stream.end(said)


@pytest.mark.slow
@settings(max_examples=60)
@given(streamed())
def test_a_stream_cut_anywhere_joins_to_the_whole_answer(case):
    said, usage, raw = case
    events = [data for _, data in events_of(raw)]
    assert events.pop() == "[DONE]"
    for chunk in events:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    if usage:
        assert events[-1]["choices"] == []
        assert [chunk["usage"] for chunk in events[:-1]] == [None] * (len(events) - 1)
    whole = OpenAIChat().answer(read(n=len(said), logprobs=True), said, STAMP)
    ChatCompletion.model_validate(whole, strict=True)
    assert (events[-1].get("usage") if usage else whole["usage"]) == whole["usage"]
    for one, choice in zip(joined(events, len(said)), whole["choices"], strict=True):
        message = choice["message"]
        assert (one["content"], one["reasoning"]) == (message["content"], message.get("reasoning_content"))
        calls = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", ())]
        assert list(one["calls"].values()) == calls
        assert one["tokens"] == choice["logprobs"]["content"]
        assert one["finish"] == choice["finish_reason"]


def test_a_stream_that_said_something_else_is_not_ended_as_if_it_had_not():
    stream = OpenAIChat().stream(read(stream=True), STAMP)
    stream.delta(ChatDelta(content="ab"))
    with pytest.raises(StreamDiverged):
        stream.end([say("ac", 1)])


def test_an_error_ends_a_stream_as_clients_expect_it():
    ((_, data),) = events_of(OpenAIChat().stream(read(stream=True), STAMP).error(503, "the engine died"))
    assert data["error"]["message"] == "the engine died"


def test_long_arguments_come_in_several_chunks():
    call = ToolCall(name="write", arguments={"text": "x" * 50_000}, id="c")
    raw = OpenAIChat().stream(read(stream=True), STAMP).end([say("", 1, tool_calls=(call,))])
    chunks = [data for _, data in events_of(raw) if data != "[DONE]"]
    assert max(len(json.dumps(chunk)) for chunk in chunks) < 10_000
    assert json.loads(joined(chunks, 1)[0]["calls"][0]["arguments"]) == {"text": "x" * 50_000}
