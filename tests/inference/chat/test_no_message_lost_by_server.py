"""A request's texts are in the prompt once and in order, or its field is refused: by each protocol of the server."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest

from campaigns import sized
from lost_messages import renderer_of, requests, sampler_for, wrong_with
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.server import serve_sampler
from waiting import HANGS

pytestmark = pytest.mark.realtime
AT_ONCE = ServerLimits(refusal_seconds=0)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("template", ["qwen3_5_think", "gptoss", "muse_glimmer"])
async def test_each_text_is_written_once_or_refused_by_its_field(template, campaign):
    row, found = campaign("requests to the server: written once, or refused by field"), {}
    renderer = renderer_of(template)
    sampler, statuses = sampler_for(renderer), Counter()
    async with (
        serve_sampler(sampler, renderer=renderer, limits=AT_ONCE, model="m") as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGS) as client,
    ):
        for name, given, body in requests(sized(7, 300)):
            answer = await client.post(f"/v1/{name[1]}", json=body)
            statuses[answer.status_code] += 1
            prompt = renderer.decode(sampler.requests[-1].prompt_ids) if answer.status_code == 200 else ""
            wrong = wrong_with(given, answer.status_code, answer.json(), prompt, template)
            row.add(wrong=bool(wrong))
            if wrong:
                found[name] = wrong
    assert found == {}
    assert set(statuses) <= {200, 400}
    assert statuses[200] >= row.cases // 4


async def test_a_call_whose_arguments_are_no_object_is_refused_by_its_field():
    renderer = renderer_of("qwen3_5_think")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{oops"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "20"},
    ]
    async with (
        serve_sampler(sampler_for(renderer), renderer=renderer, limits=AT_ONCE, model="m") as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGS) as client,
    ):
        answer = await client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[1].tool_calls[0].function.arguments: expected ")
