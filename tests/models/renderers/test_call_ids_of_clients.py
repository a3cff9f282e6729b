"""Clients that rename the ids of calls, or bring their own, through the gateway and through `verbatim serve`."""

from __future__ import annotations

import aiohttp
import numpy as np
import pytest
from families import family_renderer, family_tokenizer

from verbatim.inference.http.server import serve_sampler
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts.gateway import Gateway

pytestmark = pytest.mark.realtime
KIMI = ["kimi-k2", "kimi-k2.5"]
ASK = {"role": "user", "content": "Play."}
TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "object", "properties": {}}}}]
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.guess:{}<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)


def sampler_of(name, *texts):
    tokenizer = family_tokenizer(name)
    thought = "</think>" if name == "kimi-k2.5" else ""
    script = [np.array(tokenizer.encode(thought + text), dtype=np.int32) for text in texts]
    return ScriptedSampler(script=script, vocab_size=len(tokenizer), context_length=10_000)


def called(call_id):
    call = {"id": call_id, "type": "function", "function": {"name": "guess", "arguments": "{}"}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def prompts(name, sampler):
    return [family_renderer(name).decode(request.prompt_ids) for request in sampler.requests]


def returns(prompt):
    return [part.partition("\n")[0] for part in prompt.split("## Return of ")[1:]]


async def post(url, messages, key="none"):
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("name", KIMI)
async def test_the_gateway_binds_a_result_to_the_call_that_a_client_has_renamed(name):
    sampler = sampler_of(name, CALL.format(0), CALL.format(1), "done<|im_end|>")
    async with Gateway(sampler, family_renderer(name)) as gateway:
        episode = gateway.episode()
        history = [ASK]
        for number, own in enumerate(("toolu_1", "toolu_2")):
            status, answer = await post(episode.base_url, history, episode.api_key)
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert (status, call["id"]) == (200, f"functions.guess:{number}")
            history += [called(own), {"role": "tool", "tool_call_id": own, "content": "no"}]
        status, answer = await post(episode.base_url, history, episode.api_key)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "done")
        trajectory = await episode.finish()
    assert returns(prompts(name, sampler)[-1]) == ["functions.guess:0", "functions.guess:1"]
    assert trajectory.turns[1].extends(trajectory.turns[0]) and trajectory.turns[2].extends(trajectory.turns[1])
    assert [message.get("tool_call_id") for message in trajectory.messages if message["role"] == "tool"] == [
        "functions.guess:0",
        "functions.guess:1",
    ]


@pytest.mark.parametrize("server", ["gateway", "serve"])
@pytest.mark.parametrize("name", KIMI)
async def test_a_history_of_another_server_has_the_tools_name_in_its_ids(name, server):
    sampler = sampler_of(name, "done<|im_end|>")
    history = [ASK, called("call_8"), {"role": "tool", "tool_call_id": "call_8", "content": "no"}]
    wrong = [
        ASK,
        {**called("a"), "tool_calls": [*called("a")["tool_calls"], *called("b")["tool_calls"]]},
        {"role": "tool", "tool_call_id": "zz", "content": "no"},
    ]
    if server == "gateway":
        async with Gateway(sampler, family_renderer(name)) as gateway:
            episode = gateway.episode()
            answers = [await post(episode.base_url, sent, episode.api_key) for sent in (wrong, history)]
            await episode.finish()
    else:
        async with serve_sampler(sampler, renderer=family_renderer(name)) as serving:
            answers = [await post(f"{serving.url}/v1", sent) for sent in (wrong, history)]
    assert [status for status, _ in answers] == [400, 200]
    assert "tool_call_id = 'zz'" in answers[0][1]["error"]["message"]
    (prompt,) = prompts(name, sampler)
    assert returns(prompt) == ["functions.guess:0"]
    assert "<|tool_call_begin|>functions.guess:0<|tool_call_argument_begin|>{}" in prompt
    assert "call_8" not in prompt
