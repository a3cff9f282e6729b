"""Replies and requests for tests of chat protocols, and the events of a stream as clients read them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from verbatim.core.types import StopReason, ToolCall
from verbatim.inference.chat.answer import read_arguments
from verbatim.inference.chat.protocol import ChatDelta, ChatReply, ChatStream

texts = st.text('ab \n\r\t"\\\u2028\x00ö€🙂', max_size=12)
"""Texts with line ends of all kinds, quotes, and characters of several bytes."""
names = st.sampled_from(["add", "größe", "n_1", "x"])
json_values = st.none() | st.booleans() | st.integers(-9, 9) | texts | st.lists(texts, max_size=2) | st.just({"a": 0.5})
good_calls = st.builds(
    lambda name, arguments, number: ToolCall(name=name, arguments=arguments, raw="{}", id=f"call_{number}"),
    names,
    st.dictionaries(names, json_values, max_size=3),
    st.integers(0, 99),
)
broken_calls = st.builds(
    lambda name, raw, number: ToolCall(name=name, arguments=None, status="invalid_json", raw=raw, id=f"call_{number}"),
    st.none() | names,
    texts,
    st.integers(0, 99),
)


def same_arguments(given: Any, answered: Any) -> bool:
    """Whether arguments that came back are those of a call: an object, or the text of one that cannot be read."""
    if isinstance(answered, str):
        value, _ = read_arguments(answered)
        answered = answered if value is None else value
    return bool(given == answered)


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def replies(draw: st.DrawFn, *, calls: Any = good_calls | broken_calls) -> ChatReply:
    """Any reply, with as many tokens as are drawn; their texts have nothing to do with those of the message."""
    tokens = draw(st.lists(texts, max_size=8))
    called = draw(st.lists(calls, max_size=3))
    return ChatReply(
        content=draw(texts),
        reasoning_content=draw(st.none() | texts),
        tool_calls=tuple(called),
        stop_reason=draw(st.sampled_from([StopReason.STOP, StopReason.LENGTH])),
        stop_string=draw(st.none() | st.just("END")),
        ids=ids_of(*range(len(tokens))),
        logprobs=-np.arange(len(tokens), dtype=np.float32),
        policy_versions=np.zeros(len(tokens), np.int32),
        token_texts=tuple(tokens),
        prompt_ids=ids_of(7, 8, 9),
        num_prompt_tokens=3,
        seed=5,
    )


def events_of(stream: bytes) -> list[tuple[str | None, Any]]:
    """(name, data) of each event, as the standard of server-sent events has it; data that is no JSON as text."""
    found = []
    for block in stream.decode("ascii").split("\n\n"):
        fields = [line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":")]
        if fields:
            given = dict(fields)
            data = given["data"]
            found.append((given.get("event"), json.loads(data) if data.startswith("{") else data))
    return found


@st.composite
def cut_streams(draw: st.DrawFn, stream: ChatStream, reply: ChatReply) -> bytes:
    """The stream of a reply, cut anywhere: in thinking, in the text, or not at all before its end."""
    raw, thought = stream.begin(reply.num_prompt_tokens), reply.reasoning_content or ""
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, len(thought)))
        raw += stream.delta(ChatDelta(reasoning=thought[:size]))
        thought = thought[size:]
    if draw(st.booleans()):
        raw += stream.delta(ChatDelta(reasoning=thought))
        text = reply.content
        for _ in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, len(text)))
            raw += stream.ping + stream.delta(ChatDelta(content=text[:size]))
            text = text[size:]
    return raw + stream.end([reply])
