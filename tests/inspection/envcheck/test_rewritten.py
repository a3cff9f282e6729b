"""How a client wrote down what it sent back is told, turn by turn."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from verbatim.core.types import ToolCall
from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp
from verbatim.inspection.envcheck.rewritten import Rewritten, answers_in, ways_of

REPLY = ChatReply(
    content="so",
    reasoning_content="hm",
    ids=np.array([1], np.int32),
    tool_calls=(ToolCall(name="add", arguments={"b": 1.0, "a": 2}, raw="", id="call_0"),),
)
PROTOCOLS = {
    "openai_chat": OpenAIChat(),
    "openai_responses": OpenAIResponses(),
    "anthropic_messages": AnthropicMessages(),
}
HI = {"role": "user", "content": "hi"}


def body_with(protocol, change=lambda answer: answer):
    """A request that sends the reply back, changed."""
    if protocol == "openai_responses":
        items = PROTOCOLS[protocol].answer(PROTOCOLS[protocol].read({"input": "hi"}, {}), [REPLY], Stamp())["output"]
        result = {"type": "function_call_output", "call_id": "call_0", "output": "3"}
        return {"input": [HI, *change(copy.deepcopy(items)), result]}
    request = PROTOCOLS[protocol].read({"messages": [HI], "max_tokens": 9}, {})
    answer = PROTOCOLS[protocol].answer(request, [REPLY], Stamp())
    if protocol == "openai_chat":
        message = change(copy.deepcopy(answer["choices"][0]["message"]))
        return {"messages": [HI, message, {"role": "tool", "content": "3", "tool_call_id": "call_0"}]}
    content = change(copy.deepcopy(answer["content"]))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "3"}]}
    return {"messages": [HI, {"role": "assistant", "content": content}, result]}


def told(protocol, change=lambda answer: answer):
    (back,) = answers_in(protocol, body_with(protocol, change))
    return ways_of(ChatRequest(protocol=protocol, model="", messages=()), REPLY, back)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_comes_back_as_it_was_answered_is_not_told(protocol):
    assert told(protocol) == []


def test_ways_of_chat_completions():
    def change(message):
        (call,) = message["tool_calls"]
        call["id"], call["function"]["arguments"], call["index"] = "own", '{"a": 2, "b": 1.0}', 0
        return {
            "role": "assistant",
            "content": [{"type": "text", "text": "so"}],
            "tool_calls": [call],
            "refusal": None,
            "annotations": [],
            "name": "x",
        }

    assert told("openai_chat", change) == [
        "without reasoning_content",
        "with an empty refusal",
        "with an empty annotations",
        "with name",
        "content as parts",
        "with index of the call of add",
        "different id of the call of add",
        "arguments of add in a different order",
    ]
    assert told("openai_chat", lambda m: {**m, "content": " so\n"}) == ["different white space around the text"]
    assert told("openai_chat", lambda m: {**m, "content": None}) == ["content null"]


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        ('{"b":1.0,"a":2}', "with different white space"),
        ('{"b": 1, "a": 2}', "written differently"),
        ('{"a": 2, "b": 1.0}', "in a different order"),
    ],
)
def test_arguments(arguments, way):
    def change(message):
        message["tool_calls"][0]["function"]["arguments"] = arguments
        return message

    assert told("openai_chat", change) == [f"arguments of add {way}"]


def test_ways_of_responses():
    def change(items):
        _, message, call = items
        del message["id"], message["status"], call["id"]
        return [{"role": "assistant", "content": "so"}, {**call, "arguments": '{"b":1.0,"a":2}'}]

    assert told("openai_responses", change) == [
        "without reasoning",
        "without type of message",
        "without status of message",
        "without id of message",
        "without id of the call of add",
        "arguments of add with different white space",
    ]


def test_ways_of_anthropic():
    def change(blocks):
        _, text, call = blocks
        call["input"] = {"a": 2, "b": 1.0}
        return [{**text, "cache_control": {"type": "ephemeral"}}, {**call, "id": "toolu_1"}]

    assert told("anthropic_messages", change) == [
        "without thinking",
        "with cache_control of text",
        "different id of the call of add",
        "arguments of add in a different order",
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_way_of_a_turn_is_told_once(protocol):
    first = {"messages": [HI], "input": "hi", "max_tokens": 9}
    seen, reader = Rewritten(), PROTOCOLS[protocol]
    request = reader.read(
        {
            k: v
            for k, v in first.items()
            if (k == "input") == (protocol == "openai_responses")
            and (k != "max_tokens" or protocol == "anthropic_messages")
        },
        {},
    )
    seen.placed(request, {"input": "hi"} if "input" in protocol else first, {})
    seen.answered(request, REPLY, 0)
    body = body_with(protocol, lambda answer: answer[1:] if isinstance(answer, list) else {**answer, "refusal": None})
    back = reader.read({**body, "max_tokens": 9} if protocol == "anthropic_messages" else body, {})
    seen.placed(back, body, {1: 0})
    seen.placed(back, body, {1: 0})
    way = {"openai_chat": "with an empty refusal", "openai_responses": "without reasoning"}
    assert seen.found == {0: [way.get(protocol, "without thinking")]}
