"""The embedded engine behind the server, with a real tokenizer and template: streams join to whole answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from e2e.tiny_runs import build_tiny_model
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http.server import serve_sampler
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

HELLO: Any = [{"role": "user", "content": "guess a number"}]
SEEDS = range(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("streams") / "tiny")


@pytest.fixture
async def server(model: Path) -> AsyncIterator[tuple[str, TorchSampler]]:
    sampler = TorchSampler(
        model,
        config=TorchSettings(device="cpu", max_batch_size=8, deterministic=True),
        context_length=256,
        num_threads=1,
    )
    try:
        async with serve_sampler(sampler, renderer=create_renderer("auto", load_tokenizer(str(model)))) as served:
            yield served.url, sampler
    finally:
        await sampler.close()


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str | None]:
    fields = {"model": "policy", "messages": HELLO, "max_tokens": 60, **fields}
    if not fields.get("stream"):
        (choice,) = (await client.chat.completions.create(**fields)).choices
        return choice.message.content, choice.finish_reason
    text, finish = "", None
    async for chunk in await client.chat.completions.create(**fields):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    return text, finish


async def test_what_is_streamed_is_what_is_answered_whole(server):
    url, _ = server
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for seed in SEEDS:
            assert await chat(client, seed=seed, stream=True) == await chat(client, seed=seed)
        ours: Any = {"verbatim": {"seed": 1}}
        whole = await client.responses.create(model="policy", input=HELLO, max_output_tokens=60, extra_body=ours)
        events = await client.responses.create(
            model="policy", input=HELLO, max_output_tokens=60, stream=True, extra_body=ours
        )
        texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == whole.output_text == (await chat(client, seed=1))[0]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other:
        message = await other.messages.create(model="policy", max_tokens=60, messages=HELLO, extra_body=ours)
        async with other.messages.stream(model="policy", max_tokens=60, messages=HELLO, extra_body=ours) as stream:
            found = await stream.get_final_message()
    assert (found.content[0].text, found.stop_reason) == (message.content[0].text, message.stop_reason)


async def test_a_stop_string_costs_no_token_behind_it(server):
    url, sampler = server
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        text, _ = await chat(client, seed=2)
        stop = text[len(text) // 2 :][:3]
        expected = text.partition(stop)[0]
        before = sampler.stats().sampled_tokens
        answer = await client.chat.completions.create(
            model="policy", messages=HELLO, max_tokens=60, seed=2, stop=stop, extra_body={"return_token_ids": True}
        )
        drawn = sampler.stats().sampled_tokens - before
        assert await chat(client, seed=2, stop=stop, stream=True) == (expected, "stop")
    (choice,) = answer.choices
    assert choice.message.content == expected
    assert drawn == len(choice.token_ids) == answer.usage.completion_tokens < 60
