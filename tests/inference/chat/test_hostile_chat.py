"""Every field of every protocol with every kind of wrong value: refused by name, or answered; nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call
from campaigns import Campaign, sized
from faults.hostile_requests import CHATS, Case, body_cases, field_cases
from verbatim.core.errors import VerbatimError
from verbatim.core.types import StopReason
from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses
from verbatim.inference.chat.protocol import Stamp
from verbatim.inference.http.chat_work import read_chat, read_completion
from verbatim.inference.http.exchange import json_answer
from verbatim.inference.http.refused import Refused
from verbatim.inference.sampler import Completion

ALL: tuple[ChatProtocol, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses())
PROTOCOLS = dict(zip(CHATS, ALL, strict=True))


def outcome(data: bytes, protocol: ChatProtocol) -> str | None:
    """The message of a refusal; None where the request is answered, whole and as a stream."""
    renderer = ByteRenderer()
    ids = np.array(call("guess", number=3), dtype=np.int32)
    completion = Completion(
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        stop_reason=StopReason.STOP,
        policy_versions=np.zeros(len(ids), np.int32),
    )
    try:
        asked = read_chat(data, {}, protocol, renderer=renderer, model="tiny", room=4000, vocab_size=VOCAB_SIZE)
    except Refused as refusal:
        body = protocol.error(refusal.status, refusal.message, refusal.field)
        assert json.loads(json.dumps(body))["error"]["message"] == refusal.message
        return refusal.message
    except VerbatimError as error:
        return str(error)
    replies = [read_completion(asked, completion, 1, "c", renderer=renderer)] * asked.request.n
    stream = protocol.stream(asked.request, Stamp())
    assert stream.begin(3) + stream.end(replies)
    assert json.loads(json_answer(protocol.answer(asked.request, replies, Stamp())).body)
    return None


def unnamed(cases: list[Case], answer: Callable[[bytes, ChatProtocol], str | None], row: Campaign) -> list[str]:
    """The cases whose refusal names no field that is wrong, or says too much."""
    found = []
    for case in cases:
        said = answer(case.data, PROTOCOLS[case.path])
        wrong = said is not None and (
            len(said) >= 2000 or (bool(case.names) and not any(name in said for name in case.names))
        )
        row.add(wrong=wrong)
        found += [f"{case.name}: {said}"] if wrong else []
    return found


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("path", CHATS)
def test_every_wrong_value_is_refused_by_name_or_answered(path, campaign):
    cases = [case for case in [*field_cases(), *body_cases()] if case.path == path and case.method == "POST"]
    assert len(cases) > 900
    assert unnamed(cases[:: sized(5, 1)], outcome, campaign("hostile chat requests")) == []


@pytest.mark.slow
def test_a_refusal_that_names_no_field_is_found():
    cases = [case for case in field_cases() if case.path == CHATS[0]][:50]
    found = unnamed(cases, lambda data, protocol: "a wrong value", Campaign("planted"))
    assert len(found) == sum(bool(case.names) for case in cases) > 40
    assert unnamed(cases, lambda data, protocol: None, Campaign("planted")) == []
