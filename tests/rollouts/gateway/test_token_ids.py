"""Clients that render by themselves get ids for ids; the turns are recorded as those of chats are."""

import asyncio

import numpy as np
import pytest
from scripted_gateway import Client, gateway_over, scripted

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, say
from verbatim import build_samples
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.http.sampler import HttpSampler
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.gateway.session import INFO
from waiting import until

pytestmark = pytest.mark.realtime

ROUTE = "../inference/v1/generate"


def prompt(*texts):
    return ByteRenderer().render_ids([{"role": "user", "content": text} for text in texts])


def body(ids, **params):
    return {"token_ids": np.asarray(ids).tolist(), "sampling_params": {"logprobs": 1, **params}}


async def test_our_own_client_samples_through_it_and_every_turn_is_recorded(http):
    sampler = scripted(policy_version=3)
    async with gateway_over(sampler) as gateway:
        episode = gateway.episode()
        url = episode.keyed_url.removesuffix("/v1")
        asking = HttpSampler(url, context_length=1000, vocab_size=VOCAB_SIZE, ours=True)
        first = await asking.generate(
            SampleRequest(prompt_ids=prompt("hi"), params=SamplingParams(stop_token_ids=(END,)), seed=1)
        )
        longer = np.concatenate([prompt("hi"), first.ids, prompt("more")])
        await asking.generate(SampleRequest(prompt_ids=longer, params=SamplingParams(max_tokens=3), seed=1))
        await asking.close()
        trajectory = await episode.finish(reward=1.0)
    assert first.ids.tolist() == say("5:hi")
    assert first.policy_versions.tolist() == [3] * len(first.ids)
    np.testing.assert_array_equal(first.logprobs, np.float32(-1.0 / (1 + first.ids)))
    assert [t.prompt_ids.tolist() for t in trajectory.turns] == [prompt("hi").tolist(), longer.tolist()]
    assert [t.stop_reason for t in trajectory.turns] == ["stop", "length"]
    assert len(build_samples(trajectory)) == 1


async def test_the_runs_stop_strings_end_turns_of_exact_ids_too(http):
    sampler = scripted(lambda request: np.array(say("one;two"), np.int32))
    async with gateway_over(sampler, params=SamplingParams(stop=(";",))) as gateway:
        episode = gateway.episode()
        answer = await Client(http, episode).post(ROUTE, body(prompt("hi")))
        trajectory = await episode.finish()
    assert answer["choices"][0]["token_ids"] == trajectory.turns[0].completion_ids.tolist() == say("one;")[:-1]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_run_says_how_is_sampled_and_headers_name_the_agent(http):
    sampler = scripted()
    async with gateway_over(sampler, params=SamplingParams(temperature=0.7, max_tokens=50)) as gateway:
        episode = gateway.episode()
        headers = {"x-verbatim-agent": "solver", "x-verbatim-trained": "false"}
        await Client(http, episode).post(ROUTE, body(prompt("hi"), temperature=0.1, max_tokens=9), **headers)
        trajectory = await episode.finish()
    (turn,) = trajectory.turns
    assert (turn.agent, turn.trained, turn.temperature) == ("solver", False, 0.7)
    assert sampler.requests[0].params.max_tokens == 9


@pytest.mark.parametrize("route", [ROUTE, "chat/completions", "responses", "messages"])
@pytest.mark.parametrize("word", ["maybe", "", "no", "tru"])
async def test_a_request_that_says_otherwise_whether_it_is_trained_is_refused(http, route, word):
    sent = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    given = {ROUTE: body(prompt("hi")), "responses": {"model": "m", "input": "hi"}}.get(route, sent)
    async with gateway_over(scripted()) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        answer = await client.post(route, given, **{"x-verbatim-trained": word})
        assert client.status == 400
        assert answer["error"]["message"] == (f'the header X-Verbatim-Trained is {word!r}; expected "true" or "false"')
        await client.post(route, given, **{"x-verbatim-trained": " FALSE "})
        trajectory = await episode.finish()
    assert [turn.trained for turn in trajectory.turns] == [False]


async def test_a_repeated_request_is_recorded_once(http):
    async with gateway_over(scripted(lambda r: np.array(say(str(r.seed)), np.int32))) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        first, again, other = [
            (await client.post(ROUTE, body(prompt("hi")), **headers))["choices"]
            for headers in ({}, {"x-stainless-retry-count": "1"}, {})
        ]
        trajectory = await episode.finish()
    assert first == again != other
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({}, "token_ids: expected a list of token ids"),
        ({"token_ids": [VOCAB_SIZE]}, "outside the vocabulary"),
        ({"token_ids": []}, "at least one token id"),
        ({"token_ids": [1], "logit_bias": {"5": 1}}, "logit_bias"),
        ({"token_ids": [1], "sampling_params": {"presence_penalty": 1}}, "presence_penalty"),
        ({"token_ids": [1] * 50}, "maximum context length is 40"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_and_the_episode_goes_on(http, sent, said):
    async with gateway_over(limits=EpisodeLimits(max_turns=5, max_context=40)) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        answer = await client.post(ROUTE, sent)
        assert client.status == 400 and said in answer["error"]["message"]
        await client.post(ROUTE, body(prompt("hi")))
        assert client.status == 200
        trajectory = await episode.finish()
    assert (len(trajectory.turns), trajectory.error, trajectory.stop_reason) == (1, None, "stop")


async def test_a_failing_sampler_is_an_error_until_the_same_prompt_is_answered(http):
    async with gateway_over(scripted(trouble={0: "fail", 2: "fail"})) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        await client.post(ROUTE, body(prompt("hi")))
        assert client.status == 500
        await client.post(ROUTE, body(prompt("hi")))
        mended = episode.session.fault
        await client.post(ROUTE, body(prompt("ho")))
        trajectory = await episode.finish()
    assert mended is None
    assert "request 2 fails: the script says so" in trajectory.error


async def test_a_client_that_goes_ends_the_sampling(http):
    sampler = scripted(lambda r: np.array(say("x" * 20_000), np.int32), seconds_per_token=0.01)
    async with gateway_over(sampler, patience=0.02) as gateway:
        episode = gateway.episode()
        asking = asyncio.create_task(Client(http, episode).post(ROUTE, body(prompt("hi"))))
        await until(lambda: sampler.num_drawn)
        asking.cancel()
        await until(lambda: sampler.num_cancelled)
        trajectory = await episode.finish()
    assert asking.cancelled()
    assert (sampler.num_cancelled, trajectory.num_unrecorded_tokens) == (1, sampler.num_drawn)
    assert trajectory.info[INFO]["counts"] == {"requests": 1, "left": 1}


async def test_sessions_of_one_key_are_told_apart_by_name(http):
    async with gateway_over() as gateway:
        one, two = gateway.episode(), gateway.episode()
        service = gateway.service
        key = service.open_group(context_length=123)
        for name, episode in (("a", one), ("b", two)):
            service.join(key, name, episode.session)
        client = Client(http, one)
        client.headers["authorization"] = f"Bearer {key}"
        for name, status in (("a", 200), ("b", 200), ("b", 200), ("c", 404), ("", 404)):
            await client.post(ROUTE, body(prompt(name)), **{"x-session-id": name})
            assert client.status == status, name
        service.leave(key, "b")
        await client.post(ROUTE, body(prompt("b")), **{"x-session-id": "b"})
        assert client.status == 404
        async with http.get(f"{one.base_url}/models", headers=client.headers) as models:
            assert (await models.json())["data"][0]["max_model_len"] == 123
        assert [len((await episode.finish()).turns) for episode in (one, two)] == [1, 2]
