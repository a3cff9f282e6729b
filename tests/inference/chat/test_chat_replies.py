"""Completions as replies: stop strings are cut in token space, single calls too, and nothing else changes."""

from __future__ import annotations

import doctest
import json
from typing import Any

import numpy as np
import pytest
from chat_records import ids_of
from hypothesis import given
from hypothesis import strategies as st

from byte_renderer import END, ByteRenderer, call, text
from verbatim.core.types import StopReason
from verbatim.inference.chat import stops
from verbatim.inference.chat.protocol import ChatReply, ChatRequest
from verbatim.inference.chat.reply import read_reply
from verbatim.inference.chat.stops import StopWatch, find_stop, held_back
from verbatim.inference.sampler import Completion

WORDS = ["a", "b", ";", "\n", "ö", "€", "🙂", "ab;", "\n\nOb", "s:"]
PROMPT = ids_of(257, 104, END, 258)


class WordRenderer(ByteRenderer):
    """Tokens of several bytes or of a part of a character: the ids 300.. are words, those below are bytes."""

    def decode(self, ids):
        raw = b"".join(WORDS[i - 300].encode() if i >= 300 else bytes([i]) for i in ids.tolist() if i < 256 or i >= 300)
        return raw.decode(errors="replace")


def complete(*ids: int, reason: StopReason = StopReason.STOP) -> Completion:
    return Completion(
        ids=ids_of(*ids),
        logprobs=-np.arange(len(ids), dtype=np.float32),
        policy_versions=np.arange(len(ids), dtype=np.int32),
        stop_reason=reason,
    )


def reply(*ids: int, reason: StopReason = StopReason.STOP, **fields: Any) -> ChatReply:
    request = ChatRequest(protocol="openai_chat", model="", messages=({"role": "user", "content": "h"},), **fields)
    return read_reply(complete(*ids, reason=reason), request, ByteRenderer(), PROMPT, call_id=lambda k: f"call_{k}")


def test_examples_are_true():
    assert doctest.testmod(stops).failed == 0


token_lists = st.lists(st.integers(300, 300 + len(WORDS) - 1) | st.sampled_from(list("é€🙂".encode())), max_size=12)


@given(token_lists, st.lists(st.sampled_from([";", "b;", "\nOb", "s:", "€", "ö🙂", "zz"]), max_size=3, unique=True))
def test_the_first_token_that_completes_a_stop_string_ends_the_completion(ids, wanted):
    decode = WordRenderer().decode
    sizes = range(len(ids) + 1)
    shortest = next((k for k in sizes if any(stop in decode(ids_of(*ids[:k])) for stop in wanted)), None)
    found = find_stop(ids_of(*ids), wanted, decode)
    if shortest is None:
        assert found is None
        return
    assert found is not None
    assert found[0] == shortest
    said = decode(ids_of(*ids[:shortest]))
    assert said.index(found[1]) == min(said.index(stop) for stop in wanted if stop in said)


@given(
    token_lists, st.lists(st.sampled_from([";", "b;", "\nOb", "s:", "€", "ö🙂"]), min_size=1, max_size=3, unique=True)
)
def test_who_watches_token_by_token_stops_at_the_same_token(ids, wanted):
    watch, decode = StopWatch(wanted, WordRenderer().decode), WordRenderer().decode
    stopped = next((k + 1 for k, token in enumerate(ids) if watch([token])), None)
    found = find_stop(ids_of(*ids), wanted, decode)
    assert stopped == (None if found is None else found[0])


def test_a_stop_string_far_into_a_long_text_is_seen():
    watch = StopWatch(["END"], ByteRenderer().decode)
    assert not watch(text("x" * 5000 + "EN"))
    assert watch(text("D"))


@given(st.text("ab;", max_size=8), st.lists(st.text("ab;", min_size=1, max_size=4), max_size=3))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(said, wanted):
    begins = [
        size
        for size in range(len(said) + 1)
        for stop in wanted
        if size < len(stop) and stop.startswith(said[len(said) - size :])
    ]
    assert held_back(said, wanted) == max(begins, default=0)


def test_a_stop_string_stays_in_the_ids_and_leaves_the_text():
    found = reply(*text("one\nObs: two"), END, stop=("\nObs:", "two"))
    assert (found.content, found.stop_string, found.finish) == ("one", "\nObs:", "stop_string")
    assert found.ids.tolist() == text("one\nObs:")
    assert found.num_cut_tokens == len(text(" two")) + 1
    assert found.logprobs is not None and found.policy_versions is not None
    assert len(found.logprobs) == len(found.policy_versions) == len(found.ids)
    assert found.stop_reason is StopReason.STOP


def test_without_a_stop_string_nothing_is_cut():
    found = reply(*text("one"), END, stop=("two",))
    assert (found.content, found.stop_string, found.num_cut_tokens, found.finish) == ("one", None, 0, "stop")
    cut = reply(*text("one"), reason=StopReason.LENGTH, stop=("two",))
    assert (cut.finish, cut.stop_reason) == ("length", StopReason.LENGTH)


def test_a_call_that_a_stop_string_cuts_cannot_be_read():
    found = reply(*call("add", a="STOP"), stop=("STOP",))
    (made,) = found.tool_calls
    assert (made.status, made.arguments) == ("unclosed_block", None)
    assert made.raw == '{"name": "add", "arguments": {"a": "'
    assert found.finish == "stop_string"


def test_calls_get_ids_and_go_into_the_message():
    found = reply(*text("so "), *call("add", a=1)[:-1], 261, *text("{"), 262, END)
    assert [c.id for c in found.tool_calls] == ["call_0", "call_1"]
    assert found.message == {
        "role": "assistant",
        "content": "so ",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            {"id": "call_1", "type": "function", "function": {"name": "", "arguments": "{"}},
        ],
    }
    assert found.finish == "tool_calls"


def test_with_one_call_allowed_the_ids_end_with_the_first():
    first, second = call("add", a=1)[:-1], call("add", a=2)
    found = reply(*text("so "), *first, *second, parallel_tool_calls=False)
    assert [c.arguments for c in found.tool_calls] == [{"a": 1}]
    assert found.ids.tolist() == [*text("so "), *first]
    assert (found.num_cut_tokens, found.finish) == (len(second), "tool_calls")
    both = reply(*text("so "), *first, *second)
    assert [c.arguments for c in both.tool_calls] == [{"a": 1}, {"a": 2}]
    alone = reply(*first, END, parallel_tool_calls=False)
    assert (alone.ids.tolist(), alone.num_cut_tokens) == ([*first, END], 0)


def test_where_no_call_is_wanted_its_text_is_text():
    found = reply(*text("so "), *call("add", a=1), tool_choice="none")
    assert (found.tool_calls, found.finish) == ((), "stop")
    assert found.content == "so \n" + json.dumps({"name": "add", "arguments": {"a": 1}})


@pytest.mark.parametrize("wanted", [True, False])
def test_texts_of_tokens_and_the_prompt_are_there_where_they_are_wanted(wanted):
    found = reply(*text("ö"), END, include_logprobs=wanted, include_token_ids=wanted)
    assert found.token_texts == (("\ufffd", "\ufffd", "") if wanted else ())
    assert (found.prompt_ids is not None) == wanted
    assert found.num_prompt_tokens == 4
