"""Whatever is sampled, and however it arrives: a stream joins to the reply that the whole completion is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import family_renderer, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_stable_text import completions

from drawn import drawn, is_found
from verbatim.core.types import StopReason
from verbatim.inference.chat.partial import Growing, partial_texts
from verbatim.inference.chat.protocol import ChatRequest
from verbatim.inference.chat.reply import read_reply
from verbatim.inference.chat.stops import StopWatch
from verbatim.inference.sampler import Completion
from verbatim.models.renderers import create_renderer

STOPS = ["look", "\n\n", " I", "ö", "🙂", "<", "</think>", "{", "call>", "so so"]
FORMATS = ["qwen3", "glm-4.5", "deepseek-v3", "kimi-k2", "minimax-m2", "template qwen3", "template llama-3"]


def renderer_of(name: str):
    kind, _, family = name.rpartition(" ")
    return create_renderer("template", family_tokenizer(family)) if kind else family_renderer(family)


def sampled(ids: list[int], ends: tuple[int, ...]) -> Completion:
    stop = next((k + 1 for k, token in enumerate(ids) if token in ends), None)
    kept = np.array(ids[:stop], dtype=np.int32)
    return Completion(
        ids=kept,
        logprobs=np.zeros(len(kept), np.float32),
        policy_versions=np.zeros(len(kept), np.int32),
        stop_reason=StopReason.LENGTH if stop is None else StopReason.STOP,
    )


def replies(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """What is sampled, what is asked for, and after how many tokens something is streamed."""
    return st.fixed_dictionaries(
        {
            "ids": completions(name.rpartition(" ")[2]),
            "stops": st.lists(st.sampled_from(STOPS), max_size=2, unique=True),
            "parallel": st.booleans(),
            "choice": st.sampled_from(["auto", "none"]),
            "cuts": st.lists(st.integers(0, 40), max_size=6),
        }
    )


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@drawn("streamed replies", 10, 1000)
def test_what_is_streamed_of_a_completion_begins_its_reply(name, data):
    joins(renderer_of(name), **data.draw(replies(name)))


def joins(renderer, ids, stops, parallel, choice, cuts, partial=partial_texts) -> None:
    """`partial` is what is streamed of the tokens so far."""
    prompt = renderer.render_ids([{"role": "user", "content": "hi"}])
    completion = sampled(ids, renderer.stop_token_ids)
    request = ChatRequest(
        protocol="openai_chat",
        model="",
        messages=(),
        stop=tuple(stops),
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    reply = read_reply(completion, request, renderer, prompt, call_id=str)
    assert reply.ids.tolist() == completion.ids.tolist()[: len(reply.ids)]
    assert len(reply.ids) + reply.num_cut_tokens == len(completion.ids)
    assert reply.logprobs is not None and len(reply.logprobs) == len(reply.ids)
    if reply.stop_string is not None:
        assert StopWatch(stops, renderer.decode)(reply.ids.tolist())
    growing = Growing()
    for size in sorted(cuts):
        growing.ids = completion.ids.tolist()[:size]
        growing.gained(*partial(completion.ids[:size], request, renderer, prompt))
    rest = growing.said.rest(reply)  # or it has diverged
    assert growing.said.reasoning + rest.reasoning == (reply.reasoning_content or "")
    assert growing.said.content + rest.content == reply.content


def test_a_stream_that_is_ahead_of_what_is_settled_is_found():
    """The campaign can fail."""
    renderer = renderer_of("template qwen3")

    def everything(ids, request, renderer, prompt):
        return "", renderer.decode(ids)

    def case(drawn):
        try:
            joins(renderer, **drawn, partial=everything)
        except Exception as error:
            raise AssertionError from error  # it says that it has diverged

    assert is_found(case, replies("template qwen3"))
