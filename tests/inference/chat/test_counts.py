"""Counts of cached tokens are the engine's; where it gives none, none is made up."""

import numpy as np
import pytest

from byte_renderer import ByteRenderer, say
from verbatim.core.types import StopReason
from verbatim.inference.chat import anthropic_form, openai_form, responses_form
from verbatim.inference.chat.protocol import ChatRequest
from verbatim.inference.chat.reply import read_reply
from verbatim.inference.http.completions import completion_body, read_completion
from verbatim.inference.sampler import Completion


def completion(cached):
    ids = np.array(say("hi"), np.int32)
    return Completion(
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        policy_versions=None,
        stop_reason=StopReason.STOP,
        num_cached_tokens=cached,
    )


def reply(cached):
    request = ChatRequest(protocol="openai_chat", model="m", messages=())
    return read_reply(completion(cached), request, ByteRenderer(), np.arange(9, dtype=np.int32), call_id=str)


@pytest.mark.parametrize("cached", [0, 4])
def test_what_the_engine_says_is_in_every_protocols_answer(cached):
    said = reply(cached)
    assert openai_form.usage_of([said])["prompt_tokens_details"] == {"cached_tokens": cached}
    usage = anthropic_form.usage_of(said)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (9 - cached, cached)
    assert responses_form.usage_of(said)["input_tokens_details"]["cached_tokens"] == cached


def test_where_it_says_nothing_the_field_is_left_out():
    said = reply(None)
    assert "prompt_tokens_details" not in openai_form.usage_of([said])
    assert anthropic_form.usage_of(said) == {"input_tokens": 9, "output_tokens": 3}


@pytest.mark.parametrize("cached", [None, 0, 4])
def test_the_count_goes_over_http(cached):
    body = completion_body(
        completion(cached), request_id="r", model="m", seed=0, num_prompt_tokens=9, policy_version=0, logprobs="packed"
    )
    assert read_completion(body)[0].num_cached_tokens == cached
