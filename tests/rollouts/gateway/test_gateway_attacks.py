"""What a program may do to its gateway's port without stopping the others: connections, heads, bodies, chunks, JSON."""

import asyncio
import contextlib
import logging
import resource
import socket

import pytest
from scripted_gateway import Client, gateway_over

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.inference.http.doors import Door, Pace
from verbatim.inference.http.refused import Refused
from verbatim.rollouts.gateway.budget import ByteBudget
from verbatim.rollouts.gateway.service import ServiceLimits
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bear"


def user(text):
    return {"role": "user", "content": text}


@contextlib.contextmanager
def a_door(gateway):
    """The address of a socket as a program in its sandbox has one."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    door = gateway.service.open_door(listening)
    try:
        yield listening.getsockname(), door
    finally:
        gateway.service.close_door(door)


async def said(address, data, most=2**16):
    """What the gateway answers to these bytes, until it hangs up or is silent behind an answer."""
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(HANGS):
            answer = await reader.read(most)
    writer.close()
    return answer


def status(answer):
    return int(answer.split(b" ", 2)[1]) if answer else 0


def address_of(gateway):
    return "127.0.0.1", int(gateway.url.rpartition(":")[2])


# ---- connections


async def attack(address, count, data, done):
    """Open connections one after the other, send this on each and hold it; again where one is closed."""
    loop, held = asyncio.get_running_loop(), []
    try:
        while not done.is_set():
            one = socket.socket()
            one.setblocking(False)
            try:
                async with asyncio.timeout(0.5):
                    await loop.sock_connect(one, address)
                    await loop.sock_sendall(one, data)
            except (TimeoutError, OSError):
                one.close()
                continue
            held.append(one)
            if len(held) > count:
                held.pop(0).close()
    finally:
        for one in held:
            one.close()


@pytest.mark.slow
async def test_a_program_that_opens_connections_without_end_stops_no_other_session(http):
    """Over a door with 64 places, 800 half heads; meanwhile another session asks over the gateway's own port."""
    raise_descriptor_limit()
    limits = ServiceLimits(program_connections=64, program_requests=2000.0)
    async with gateway_over(service_limits=limits) as gateway:
        done = asyncio.Event()
        with a_door(gateway) as (address, door):
            attacking = asyncio.create_task(attack(address, 800, HALF, done))
            most, client = 0, Client(http, gateway.episode())
            await until(lambda: gateway.service.num_connections(door) >= 60)
            for k in range(20):
                await client.chat([user(f"{k}")])
                assert client.status == 200
                most = max(most, gateway.service.num_connections(door))
            done.set()
            await attacking
        assert 60 <= most <= 64
        await until(lambda: gateway.service.num_connections() <= 1)  # the client's own


async def test_a_program_in_its_sandbox_has_its_own_places_and_the_oldest_go():
    limits = ServiceLimits(program_connections=3)
    async with gateway_over(service_limits=limits) as gateway:
        with a_door(gateway) as (address, _):
            held = [await asyncio.open_connection(*address) for _ in range(3)]
            await until(lambda: gateway.service.num_connections() == 3)
            fourth, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status(await fourth.read(2**16)) == 200
            assert gateway.service.num_connections() == 3
            with contextlib.suppress(ConnectionError):
                assert await held[0][0].read() == b"", "the oldest made room"
            for _, each in (*held, (None, writer)):
                each.close()


async def test_a_door_that_closes_takes_its_connections_along(gateway):
    with a_door(gateway) as (address, _):
        reader, writer = await asyncio.open_connection(*address)
        await until(lambda: gateway.service.num_connections())
    async with asyncio.timeout(HANGS):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    assert gateway.service.num_connections() == 0
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(*address)


async def test_half_a_head_is_not_waited_for():
    async with gateway_over(service_limits=ServiceLimits(head_seconds=0.1)) as gateway:
        assert await said(address_of(gateway), HALF) == b""
        assert gateway.service.num_connections() == 0


def test_a_door_spreads_what_comes_over_time():
    door = Door("a", most=2, per_second=1e-3)
    door.requests = Pace(1e-3, 2, now=lambda: 5.0)
    assert [round(door.requests.delay()) for _ in range(4)] == [0, 0, 1000, 2000]
    assert sum(door.accepts.delay() == 0 for _ in range(100)) == 64


async def test_the_end_does_not_wait_for_half_heads():
    # If the end waited for their heads, this test would hang.
    async with gateway_over(service_limits=ServiceLimits(head_seconds=1e6)) as gateway:
        held = [await asyncio.open_connection(*address_of(gateway)) for _ in range(100)]
        for _, writer in held:
            writer.write(HALF)
        await until(lambda: gateway.service.num_connections() == 100)
    assert gateway.service.num_connections() == 0
    for _, writer in held:
        writer.close()


async def test_the_limit_of_descriptors_is_raised_with_the_gateway():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        async with gateway_over():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- what is no request


MALFORMED = {
    "two hosts": b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\nhost: x\r\n: y\r\n\r\n",
    "two lengths": b"POST /v1/reward HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a negative length": b"POST /v1/reward HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
    "a long head": b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
    "a chunk of no size": b"POST /v1/reward HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "another encoding": b"POST /v1/reward HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_what_is_no_request_is_refused_without_a_word_in_the_log(kind, gateway, caplog):
    caplog.set_level(logging.WARNING)
    expected = {"a long head": (431,), "another encoding": (501,), "two lengths": (400, 401)}
    assert status(await said(address_of(gateway), MALFORMED[kind])) in expected.get(kind, (400, 401))
    assert caplog.records == []


# ---- bodies


def chunked(parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def post(key, data, length=None, route="v1/chat/completions"):
    about = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    return b"POST /s/%b/%b HTTP/1.1\r\nhost: x\r\n%b\r\nconnection: close\r\n\r\n%b" % (
        key.encode(),
        route.encode(),
        about,
        data,
    )


async def test_chunks_are_taken_unless_they_are_of_a_few_bytes(gateway):
    episode, address = gateway.episode(), address_of(gateway)
    body = b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"x" * 30_000)
    large = chunked([body[k : k + 1000] for k in range(0, len(body), 1000)])
    assert status(await said(address, post(episode.api_key, large))) == 200
    tiny = chunked([body[k : k + 1] for k in range(len(body))])
    answer = await said(address, post(episode.api_key, tiny))
    assert status(answer) in (0, 411)  # it may have hung up while the client still sent
    assert len((await episode.finish()).turns) == 1


async def test_the_bytes_of_a_session_at_a_time_are_limited():
    limits = ServiceLimits(max_body=10_000, session_bytes=15_000)
    async with gateway_over(service_limits=limits) as gateway:
        one, two, address = gateway.episode(), gateway.episode(), address_of(gateway)
        _, held = await asyncio.open_connection(*address)
        held.write(post(one.api_key, b"{", 9000))
        await until(lambda: gateway.service.held_bytes == 9000)
        assert status(await said(address, post(one.api_key, b"{", 9000))) == 429
        assert status(await said(address, post(two.api_key, b"[]", 2))) == 400
        held.close()
        await until(lambda: gateway.service.held_bytes == 0)


async def test_where_all_bytes_are_taken_others_wait_and_are_told_so():
    budget = ByteBudget(10, 15)
    async with budget.hold("a", 10, 1):
        with pytest.raises(Refused, match="more than 10 bytes"):
            async with budget.hold("a", 1, 1):
                pass
        waiting = asyncio.create_task(budget.hold("b", 10, HANGS).__aenter__())
        with pytest.raises(Refused, match="too many large requests"):
            async with budget.hold("c", 10, 0.01):
                pass
        assert not waiting.done() and budget.held == 10
    grow = await waiting
    with pytest.raises(Refused, match="more than 10 bytes"):
        grow(1)
    assert budget.held == 10


BRACKETS = b'{"messages": [{"role": "user", "content": "hi"}], "metadata": {"a": [' + b"[]," * 350_000 + b"[]]}}"


@pytest.mark.parametrize(
    "route",
    ["chat/completions", "responses", "messages", "messages/count_tokens", "reward", "../inference/v1/generate"],
)
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(http, gateway, route, monkeypatch):
    monkeypatch.setattr("orjson.loads", None)
    client = Client(http, gateway.episode())
    answer = await client.post(route, BRACKETS)
    assert client.status == 400
    assert "values, which is the limit" in answer["error"]["message"]


async def test_a_conversation_of_megabytes_is_read_on_a_thread(http, gateway, monkeypatch):
    from verbatim.rollouts.gateway import chat

    threads, run = [], asyncio.to_thread
    monkeypatch.setattr(chat.asyncio, "to_thread", lambda work, *given: (threads.append(work), run(work, *given))[1])
    client = Client(http, gateway.episode())
    messages = [user("x" * 40), {"role": "assistant", "content": "y" * 40}] * 2000
    await client.chat([*messages, user("hi")], metadata={"picture": "z" * 3_000_000})
    assert client.status == 400, "more ids than the context holds"
    assert threads


async def test_more_text_than_any_context_holds_is_not_rendered(http, monkeypatch):
    async with gateway_over() as gateway:
        episode = gateway.episode()
        monkeypatch.setattr(episode.session.loop.sampler, "context_length", 100)
        client = Client(http, episode)
        answer = await client.chat([user("x" * 25_601)])
        assert (client.status, answer["error"]["type"]) == (400, "context_length_exceeded")
        assert (await episode.finish()).stop_reason == "length"
