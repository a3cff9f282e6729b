"""Where results of calls may stand, and with whose message a request may end: one rule for all protocols."""

from __future__ import annotations

import pytest

from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.fields import BadField
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses

HELLO = {"role": "user", "content": "hi"}
LATER = {"role": "system", "content": "It is late."}
BEGUN = {"role": "assistant", "content": "It is"}
USES = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": call_id, "name": "add", "input": {}} for call_id in ("c1", "c2")],
}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": "add", "arguments": "{}"}} for call_id in ("c1", "c2")
    ],
}
ITEMS = [{"type": "function_call", "call_id": call_id, "name": "add", "arguments": "{}"} for call_id in ("c1", "c2")]


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(said):
    return {"type": "text", "text": said}


def result(call_id):
    return {"type": "tool_result", "tool_use_id": call_id, "content": f"of {call_id}"}


def tool(call_id):
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


def output(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": f"of {call_id}"}


def read(protocol, messages):
    if protocol is OpenAIResponses:
        return OpenAIResponses().read({"input": messages}, {}).messages
    return protocol().read({"max_tokens": 9, "messages": messages}, {}).messages


def refused(protocol, messages):
    with pytest.raises(BadField) as found:
        read(protocol, messages)
    assert found.value.status == 400
    return found.value.field, found.value.message


LATE = [
    (AnthropicMessages, [HELLO, USES, user(text("see:"), result("c1"), result("c2"))],
     "messages.content", "messages[2].content: the result of a call comes after a user message (messages[2]"),
    (AnthropicMessages, [HELLO, USES, user(result("c1"), text("and"), result("c2"))],
     "messages.content", "messages[2].content: the result of a call comes after a user message (messages[2]"),
    (AnthropicMessages, [HELLO, USES, HELLO, user(result("c1"), result("c2"))],
     "messages.content", "messages[3].content: the result of a call comes after a user message (messages[2]"),
    (AnthropicMessages, [HELLO, USES, user(text(""), result("c1"), result("c2"))],
     "messages.content", "messages[2].content: the result of a call comes after a user message (messages[2]"),
    (AnthropicMessages, [HELLO, USES, user(), user(result("c1"), result("c2"))],
     "messages.content", "messages[3].content: the result of a call comes after a user message (messages[2]"),
    (AnthropicMessages, [HELLO, USES, LATER, user(result("c1"), result("c2"))],
     "messages.content", "messages[3].content: the result of a call comes after a system message (messages[2]"),
    (OpenAIChat, [HELLO, CALLS, LATER, tool("c1"), tool("c2")],
     "messages", "messages[3]: the result of a call comes after a system message (messages[2])"),
    (OpenAIResponses, [HELLO, *ITEMS, output("c1"), LATER, output("c2")],
     "input", "input[5]: the result of a call comes after a system message (input[4])"),
    (OpenAIChat, [HELLO, CALLS, HELLO, tool("c1"), tool("c2")],
     "messages", "messages[3]: the result of a call comes after a user message (messages[2])"),
    (OpenAIChat, [HELLO, CALLS, tool("c1"), HELLO, tool("c2")],
     "messages", "messages[4]: the result of a call comes after a user message (messages[3])"),
    (OpenAIResponses, [HELLO, *ITEMS, HELLO, output("c1"), output("c2")],
     "input", "input[4]: the result of a call comes after a user message (input[3])"),
    (OpenAIResponses, [HELLO, *ITEMS, output("c1"), HELLO, output("c2")],
     "input", "input[5]: the result of a call comes after a user message (input[4])"),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "messages", "field", "said"), LATE)
def test_a_result_behind_what_the_user_says_is_refused(protocol, messages, field, said):
    found, message = refused(protocol, messages)
    assert (found, message[: len(said)]) == (field, said)
    assert "send the results of a turn's calls directly after the turn" in message


@pytest.mark.parametrize(
    ("protocol", "messages"),
    [
        (AnthropicMessages, [HELLO, USES, user(result("c1"), result("c2"), text("and?"))]),
        (AnthropicMessages, [HELLO, USES, user(result("c1")), user(result("c2")), user(text("and?"))]),
        (OpenAIChat, [HELLO, CALLS, tool("c1"), tool("c2"), {"role": "user", "content": "and?"}]),
        (OpenAIResponses, [HELLO, *ITEMS, output("c1"), output("c2"), {"role": "user", "content": "and?"}]),
    ],
)
def test_what_the_user_says_behind_the_results_stands_there(protocol, messages):
    found = read(protocol, messages)
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "hi"),
        ("assistant", ""),
        ("tool", "of c1"),
        ("tool", "of c2"),
        ("user", "and?"),
    ]


@pytest.mark.parametrize("protocol", [AnthropicMessages, OpenAIChat, OpenAIResponses])
def test_a_text_between_a_turn_without_calls_and_the_next_one_is_no_matter(protocol):
    assert [message["role"] for message in read(protocol, [HELLO, BEGUN, HELLO, HELLO])] == [
        "user",
        "assistant",
        "user",
        "user",
    ]


@pytest.mark.parametrize(
    ("protocol", "messages", "field", "where"),
    [
        (AnthropicMessages, [HELLO, BEGUN], "messages", "messages[1]"),
        (AnthropicMessages, [HELLO, USES], "messages", "messages[1]"),
        (OpenAIChat, [BEGUN], "messages", "messages[0]"),
        (OpenAIChat, [HELLO, BEGUN], "messages", "messages[1]"),
        (OpenAIChat, [HELLO, CALLS], "messages", "messages[1]"),
        (OpenAIResponses, [HELLO, BEGUN], "input", "input[1]"),
        (OpenAIResponses, [HELLO, *ITEMS], "input", "input[2]"),
        (
            OpenAIResponses,
            [HELLO, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}],
            "input",
            "input[1]",
        ),
    ],
)
def test_an_answer_that_was_begun_is_refused(protocol, messages, field, where):
    found, message = refused(protocol, messages)
    assert found == field
    assert message == (
        f"{where}: the last message is the assistant's, and continuing it is not supported; end with a user "
        "message or the result of a call"
    )


def test_tokens_are_counted_of_what_may_be_sent_only():
    with pytest.raises(BadField, match="continuing it is not supported"):
        AnthropicMessages(needs_limit=False).read({"messages": [HELLO, BEGUN]}, {})
