"""What a client may take of the gateway, and that no session reaches another one's."""

import asyncio
import contextlib
import hmac
import json

import numpy as np
import pytest
from scripted_gateway import Client, Held, gateway_over, scripted

from byte_renderer import say
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.gateway import service
from verbatim.rollouts.gateway.service import ServiceLimits
from verbatim.rollouts.gateway.session import INFO
from verbatim.rollouts.gateway.session_settings import SessionSettings
from waiting import HANGS, until

pytestmark = pytest.mark.realtime

ROUTES = ("chat/completions", "responses", "messages", "messages/count_tokens", "reward", "../inference/v1/generate")


def user(text):
    return {"role": "user", "content": text}


def nested(levels):
    return {"type": "object", "properties": {"a": nested(levels - 1)}} if levels else {"type": "string"}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_that_does_not_arrive_is_refused_in_time(route):
    async with gateway_over(service_limits=ServiceLimits(body_seconds=0.2)) as gateway:
        key = gateway.episode().api_key
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        path = f"v1/{route}".removeprefix("v1/../")
        writer.write(f"POST /s/{key}/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(HANGS):
            head = await reader.readline()
        writer.close()
    assert head.split()[1] == b"408"


@contextlib.asynccontextmanager
async def only_the_head(gateway, key, route):
    """The reader of a connection that has said a large body follows, and sends none of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    path = f"v1/{route}".removeprefix("v1/../")
    writer.write(f"POST /s/{key}/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n".encode())
    yield reader
    writer.close()


async def status_of(reader):
    async with asyncio.timeout(HANGS):
        return int((await reader.readline()).split()[1])


@pytest.mark.parametrize("route", ROUTES)
async def test_a_session_that_is_full_or_over_reads_no_body(gateway, route):
    episode = gateway.episode()
    if route != "reward":
        for limits, status in (({"max_requests": 0}, 403), ({"max_open": 0}, 429)):
            episode.session.settings = SessionSettings(**limits)
            async with only_the_head(gateway, episode.api_key, route) as reader:
                assert await status_of(reader) == status
    await episode.session.end()
    async with only_the_head(gateway, episode.api_key, route) as reader:
        assert await status_of(reader) == 410


async def test_bodies_that_arrive_are_requests_at_a_time(http, gateway):
    episode = gateway.episode()
    episode.session.settings = SessionSettings(sampling="client", max_open=2)
    client, route = Client(http, episode), "chat/completions"
    async with only_the_head(gateway, episode.api_key, route), only_the_head(gateway, episode.api_key, route):
        await until(lambda: episode.session._num_arriving == 2)
        await client.chat([user("hi")])
        assert client.status == 429
        await client.post("reward", {"reward": 1.0})
        assert client.status == 200
    await client.chat([user("hi")])
    async with asyncio.timeout(HANGS):
        while client.status == 429:  # until it is noticed that both have gone
            await client.chat([user("hi")])
    assert client.status == 200
    trajectory = await episode.finish()
    assert (len(trajectory.turns), trajectory.info[INFO]["counts"]) == (1, {"requests": 1})


@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_that_is_too_large_is_refused_by_every_route(http, route):
    async with gateway_over(service_limits=ServiceLimits(max_body=1000)) as gateway:
        client = Client(http, gateway.episode())
        await client.post(route, {"x": "x" * 2000})
        assert client.status == 413


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": 1e999}', b'"x"', b"null", b"\xff\xfe"])
async def test_what_is_no_body_is_refused_by_every_route(http, gateway, route, body):
    client = Client(http, gateway.episode())
    answer = await client.post(route, body)
    assert client.status == 400 and answer["error"]["message"]


async def test_what_is_nested_too_deeply_is_refused(http, gateway):
    client = Client(http, gateway.episode())
    for levels, status in ((20, 200), (40, 400)):  # two levels of JSON each
        tools = [{"type": "function", "function": {"name": "add", "parameters": nested(levels)}}]
        await client.chat([user("hi")], tools=tools)
        assert client.status == status
        await client.post(
            "messages",
            {"messages": [user("hi")], "max_tokens": 9, "tools": [{"name": "add", "input_schema": nested(levels)}]},
        )
        assert client.status == status
        await client.post(
            "responses", {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": nested(levels)}]}
        )
        assert client.status == status


async def test_a_name_that_is_too_long_is_refused_and_long_keys_are_told_apart(http, gateway):
    """They were cut: two names, or two keys of requests, that began alike were one."""
    episode = gateway.episode()
    client = Client(http, episode)
    answer = await client.chat([user("hi")], {"x-verbatim-agent": "x" * 201})
    assert client.status == 400
    assert answer["error"]["message"] == "the header X-Verbatim-Agent has 201 characters; expected at most 200"
    for end in "ab":
        await client.say([user(end)], {"x-verbatim-agent": "x" * 199 + end})
        said = await client.say([user(f"key {end}")], {"idempotency-key": "k" * 300 + end})
        assert said["content"].endswith(f":key {end}")
    agents = [turn.agent for turn in (await episode.finish()).turns]
    assert len(agents) == 4 and {"x" * 199 + "a", "x" * 199 + "b"} < set(agents)


async def test_whatever_host_a_client_names_its_key_decides(http, gateway):
    client = Client(http, gateway.episode(), host="evil.example")
    await client.chat([user("hi")])
    assert client.status == 200
    for headers, status in (({"host": "evil.example"}, 401), ({"host": "127.0.0.1"}, 401)):
        async with http.get(f"{gateway.url}/v1/models", headers=headers) as answer:
            assert answer.status == status


async def test_a_session_has_no_more_requests_than_it_may(http, gateway):
    episode = gateway.episode()
    episode.session.settings = SessionSettings(sampling="client", max_requests=2)
    client = Client(http, episode)
    for status in (200, 200, 403):
        await client.chat([user("hi")])
        assert client.status == status
    for status in (200, 200, 403):
        await client.post("messages/count_tokens", {"messages": [user("hi")]})
        assert client.status == status


async def test_a_session_has_no_more_requests_at_a_time_than_it_may(http):
    held = Held(scripted(), 3)
    async with gateway_over(held) as gateway:
        one, two = gateway.episode(), gateway.episode()
        one.session.settings = SessionSettings(sampling="client", max_open=3)
        asking = [asyncio.create_task(Client(http, one).chat([user(f"hello {k}")])) for k in range(3)]
        await until(lambda: held.num_asked == 3)
        client, other = Client(http, one), Client(http, two)
        await client.chat([user("one more")])
        await other.chat([user("hi")])
        assert (client.status, other.status) == (429, 200)
        held.released.set()
        await asyncio.gather(*asking)
        await client.chat([user("one more")])
        assert client.status == 200


async def test_clients_that_wait_for_one_answer_count_as_requests_at_a_time(http):
    held = Held(scripted(), 1)
    async with gateway_over(held) as gateway:
        episode = gateway.episode()
        episode.session.settings = SessionSettings(sampling="client", max_open=3)
        clients, key = [Client(http, episode) for _ in range(5)], {"idempotency-key": "k"}
        asking = [asyncio.create_task(client.chat([user("hi")], key)) for client in clients]
        await until(lambda: sum(task.done() for task in asking) == 2)
        held.released.set()
        await asyncio.gather(*asking)
        assert sorted(client.status for client in clients) == [200, 200, 200, 429, 429]
        await clients[0].chat([user("hi")], key)
        assert clients[0].status == 200
        assert len((await episode.finish()).turns) == 1


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}, {"x-stainless-retry-count": "1"}])
async def test_equal_requests_of_two_sessions_are_two(http, headers):
    sampler = scripted(lambda r: np.array(say(str(r.seed)), np.int32))
    async with gateway_over(sampler) as gateway:
        episodes = [gateway.episode(), gateway.episode()]
        answers = [await Client(http, episode).chat([user("hi")], headers) for episode in episodes]
        posted = Client(http, episodes[0])
        await posted.post("reward", {"reward": 1.0})
        one, two = [await episode.finish() for episode in episodes]
    assert answers[0]["choices"] != answers[1]["choices"]
    assert [len(one.turns), len(two.turns)] == [1, 1]
    assert (one.reward, two.reward) == (1.0, None)
    assert "repeated" not in {**one.info[INFO]["counts"], **two.info[INFO]["counts"]}


async def test_every_key_is_compared_in_constant_time(http, gateway, monkeypatch):
    """Also one that names no session, so that an answer's time does not tell which names there are."""
    compared = []

    class Noting:
        @staticmethod
        def compare_digest(a, b):
            compared.append((len(a), len(b)))
            return hmac.compare_digest(a, b)

    monkeypatch.setattr(service, "hmac", Noting)
    episode = gateway.episode()
    client = Client(http, episode)
    _, name, secret = episode.api_key.split("-", 2)
    keys = (f"vb-{name}-{'x' * len(secret)}", f"vb-{'0' * len(name)}-{secret}", "vb-", "")
    for key in keys:
        client.headers["authorization"] = f"Bearer {key}"
        await client.chat([user("hi")])
        assert client.status == 401
    assert len(compared) == len(keys)
    assert {right for _, right in compared} == {len(secret)}


FIELDS = {
    "chat/completions": ({"messages": [user("hi")]}, [
        {"logit_bias": {"5": 1}}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}}, {"n": 1000}, {"top_logprobs": 5, "logprobs": True},
        {"temperature": -1}, {"max_tokens": 0}, {"made_up": 1},
    ]),
    "responses": ({"input": "hi"}, [
        {"text": {"format": {"type": "json_object"}}}, {"previous_response_id": "r"}, {"truncation": "auto"},
        {"made_up": 1}, {"background": True},
    ]),
    "messages": ({"messages": [user("hi")], "max_tokens": 9}, [
        {"output_format": {"type": "json_schema"}}, {"thinking": {"type": "disabled"}}, {"container": "c"},
        {"made_up": 1}, {"mcp_servers": [{"type": "url"}]},
    ]),
}  # fmt: skip


@pytest.mark.parametrize("route", FIELDS)
async def test_fields_that_would_change_sampling_are_refused_in_the_protocols_form_and_counted(http, gateway, route):
    body, refused = FIELDS[route]
    episode = gateway.episode()
    client = Client(http, episode)
    for fields in refused:
        answer = await client.post(route, {**body, **fields})
        assert client.status == 400, fields
        assert answer["error"]["message"], fields
        assert (answer.get("type") == "error") == (route == "messages")
    await client.post(route, body)
    assert client.status == 200
    counts = (await episode.finish()).info[INFO]["counts"]
    assert sum(count for name, count in counts.items() if name.startswith("refused/")) == len(refused)
    assert counts["refused/other"] == 1, json.dumps(counts)


async def test_requests_that_are_refused_fill_no_memory(http):
    async with gateway_over(limits=EpisodeLimits(max_turns=100, max_context=60)) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        for k in range(5):
            await client.chat([user("hi"), user(f"{k} " + "x" * 100)])
            assert client.status == 400
        assert not episode.session._threads._root.children
        await client.chat([user("hi")])
        assert client.status == 200
        assert (await episode.finish()).info[INFO]["branches"] == []
