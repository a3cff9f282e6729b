"""What one client of the server can take, and what it cannot: seconds, connections, bytes, weights, another's name."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import errno
import functools
import json
import logging
import os
import re
import resource
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from slow_renderer import SlowRenderer
from verbatim.cli import serve_command
from verbatim.cli.main import main
from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import UsageError
from verbatim.inference.http import limits, protocol, render_pool
from verbatim.inference.http.acceptor import Acceptor
from verbatim.inference.http.connections import ClientConnection
from verbatim.inference.http.doors import ConnectionTable
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.scripted import ScriptedSampler
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
FOREVER = 10.0**9
CHAT = "/v1/chat/completions"


def scripted(**fields: Any) -> ScriptedSampler:
    return ScriptedSampler(script=lambda r: say("yo"), vocab_size=VOCAB_SIZE, **{"context_length": 400, **fields})


@contextlib.asynccontextmanager
async def asking(sampler: ScriptedSampler, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = {"renderer": ByteRenderer(), **settings}
    async with serve_sampler(sampler, **settings) as server:  # noqa: SIM117
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGS, verify=False) as client:
            yield client


def only(**fields: Any) -> ServerLimits:
    """These limits, and none of any other time: what a connection is closed for is one of these."""
    forever = dict.fromkeys(("head_seconds", "body_seconds", "answer_seconds", "render_seconds"), FOREVER)
    return ServerLimits(**{**forever, **fields})


def change(given: ServerLimits, **fields: Any) -> None:
    """Change limits that a server uses, from its next request on."""
    for name, value in fields.items():
        object.__setattr__(given, name, value)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What connections were closed for so far, and the limit in seconds."""
    found: list[tuple[str, float]] = []

    def note(name: str, limit: str) -> None:
        is_late = getattr(ClientConnection, name)

        def noting(self: ClientConnection) -> None:
            found.append((name.strip("_"), getattr(self._table.limits, limit)))
            is_late(self)

        monkeypatch.setattr(ClientConnection, name, noting)

    note("_head_is_late", "head_seconds")
    note("_reading_is_late", "answer_seconds")
    return found


def address(client: httpx.AsyncClient) -> tuple[str, int]:
    return str(client.base_url.host), int(client.base_url.port or 0)


def conversation(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def message(client: httpx.AsyncClient, path: str, body: Any, status: int, **headers: str) -> str:
    answer = await client.post(path, json=body, headers=headers, timeout=HANGS)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


async def is_healthy(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health", timeout=HANGS)).status_code == 200


async def closed(reader: asyncio.StreamReader) -> None:
    """Wait until the server hangs up; what it says until then is passed over."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(HANGS):
            while await reader.read(2**16):
                pass


def test_the_examples_of_the_bounds_are_true():
    assert doctest.testmod(limits).failed == 0


# ---- a dead engine


class Dying(ScriptedSampler):
    """Its engine is dead once `why` says so."""

    why: str | None = None

    @property
    def failure(self) -> str | None:
        return self.why


async def test_a_dead_engine_fails_the_health_check_and_answers_everything_with_503():
    sampler = Dying(script=lambda r: say("yo"), vocab_size=VOCAB_SIZE, context_length=400)
    async with asking(sampler) as client:
        assert await is_healthy(client)
        sampler.why = "the sampler's thread failed: ZeroDivisionError"
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, sampler.why)
        for path in (protocol.GENERATE, CHAT, protocol.PROMPT_LOGPROBS, protocol.WEIGHTS):
            assert await message(client, path, {}, 503) == sampler.why
        for path in ("/v1/models", protocol.SAMPLER):
            assert (await client.get(path)).status_code == 503


async def test_an_engine_that_dies_of_a_request_answers_that_one_with_503_too():
    sampler = Dying(script=lambda r: say("yo"), vocab_size=VOCAB_SIZE, context_length=400, trouble={0: "fail"})

    async def generate(request: Any) -> Any:
        sampler.why = "dead"
        return await ScriptedSampler.generate(sampler, request)

    sampler.generate = generate  # type: ignore[method-assign]
    async with asking(sampler) as client:
        assert await message(client, protocol.GENERATE, {"token_ids": [1]}, 503) == "dead"


def test_the_process_of_a_server_whose_engine_is_dead_ends_with_a_status_for_its_supervisor(monkeypatch, capsys):
    sampler = Dying(script=lambda r: say("yo"), vocab_size=VOCAB_SIZE, context_length=400)
    sampler.why = "the sampler's thread failed: ZeroDivisionError"
    monkeypatch.setattr(serve_command, "_make_sampler", lambda args, console: sampler)
    monkeypatch.setattr(serve_command, "_LAST_ANSWERS", 0.01)
    assert main(["serve", "model", "--renderer", "none", "--port", "0"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


# ---- seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: "], ids=["nothing", "a byte", "half"]
)
async def test_a_head_that_does_not_come_in_time_ends_the_connection(sent, late):
    async with asking(scripted(), limits=only(head_seconds=0.3)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(sent)
        await closed(reader)
        assert late == [("head_is_late", 0.3)]
        writer.close()


@pytest.mark.slow
async def test_a_head_that_drips_does_not_put_its_end_off(late):
    async with asking(scripted(), limits=only(head_seconds=0.4)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        closing = asyncio.create_task(closed(reader))
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /health HTTP/1.1\r\n")
            while not closing.done():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.02)
        await closing
        assert late == [("head_is_late", 0.4)]
        writer.close()


async def test_the_head_of_a_second_request_has_its_deadline_too(late):
    limits = only()
    async with asking(scripted(), limits=limits) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")
        change(limits, head_seconds=0.1)
        writer.write(b"GET /hea")
        await closed(reader)
        assert late == [("head_is_late", 0.1)]
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", [protocol.GENERATE, CHAT, protocol.PROMPT_LOGPROBS])
async def test_a_body_that_does_not_come_in_time_is_answered_with_408(path):
    async with asking(scripted(), limits=only(body_seconds=0.3)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 90\r\n\r\n{" % path.encode()
        )
        assert b" 408 " in await asyncio.wait_for(reader.readline(), HANGS)
        assert b"the body did not arrive within 0.3 s" in await asyncio.wait_for(reader.readuntil(b"}"), HANGS)
        await closed(reader)
        writer.close()


async def test_the_body_of_a_request_that_was_answered_already_does_not_hold_its_connection(late):
    """It is answered without its body, which then never comes."""
    limits = only()
    async with asking(scripted(), limits=limits) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert b" 404 " in await asyncio.wait_for(reader.readline(), HANGS)
        change(limits, head_seconds=0.1)
        writer.write(b"x")
        await closed(reader)
        assert late == [("head_is_late", 0.1)]
        writer.close()


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_let_go_of(late):

    async def at_once(seconds: float) -> None:
        """Draws all tokens in one turn of the event loop."""

    sampler = ScriptedSampler(script=[[5] * 60_000], vocab_size=10, context_length=500_000, pause=at_once)
    async with asking(sampler, renderer=None, limits=only(answer_seconds=0.3)) as client:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(address(client))
        reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        body = json.dumps({"token_ids": [1], "sampling_params": {"logprobs": 1}}).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            b"\r\n%b" % (protocol.GENERATE.encode(), len(body), body)
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANGS)
        promised = int(head.lower().partition(b"content-length: ")[2].split()[0])
        await until(lambda: late == [("reading_is_late", 0.3)])
        received = 0
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(2**20):
                received += len(chunk)
        assert received < promised
        writer.close()


# ---- connections


async def test_connections_without_a_request_make_room_for_those_with_one():
    async with asking(scripted(), limits=ServerLimits(max_connections=20)) as client:
        held = [await asyncio.open_connection(*address(client)) for _ in range(60)]
        assert await is_healthy(client)
        async with httpx.AsyncClient(base_url=client.base_url, verify=False, timeout=HANGS) as other:
            assert (await other.post(protocol.GENERATE, json={"token_ids": [1]})).status_code == 200
        await until(lambda: sum(reader.at_eof() for reader, _ in held) >= 40)
        for _, writer in held:
            writer.close()


async def test_where_every_connection_has_a_request_the_next_one_is_told_so():
    sampler = scripted(trouble=lambda index, r: "hang")
    async with asking(sampler, limits=ServerLimits(max_connections=8)) as client:
        post = functools.partial(client.post, protocol.GENERATE, json={"token_ids": [1]}, timeout=HANGS)
        busy = [asyncio.create_task(post()) for _ in range(8)]
        await until(lambda: sampler.num_in_flight == 8)
        async with httpx.AsyncClient(base_url=client.base_url, verify=False, timeout=HANGS) as other:
            answer = await other.get("/health")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable")
        await sampler.close()
        assert {(await task).status_code for task in busy} == {200}


class NoDescriptors(socket.socket):
    """A listening socket whose process has no descriptor left, some times."""

    times = 0

    def accept(self):
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@pytest.mark.slow
async def test_without_a_descriptor_the_server_waits_and_says_so_once(caplog):
    """It accepts again once there are some, and logs one line."""
    listening = NoDescriptors()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.times = 4
    came = asyncio.Event()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            came.set()

    caplog.set_level(logging.WARNING)
    acceptor = Acceptor(listening, Protocol, ConnectionTable(ServerLimits(), 100))
    _, writer = await asyncio.open_connection(*listening.getsockname())
    await asyncio.wait_for(came.wait(), HANGS)
    assert listening.times == 0
    assert [record.getMessage() for record in caplog.records] == [
        "no more connections can be accepted for now: Too many open files"
    ]
    writer.close()
    acceptor.close()
    listening.close()


def test_the_limit_of_descriptors_is_raised_to_what_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        room = raise_descriptor_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))
        assert raised // 2 <= room < raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- bytes


async def test_a_body_larger_than_any_context_is_refused_before_it_is_sent():
    """The server says so while the body is still to come."""
    async with asking(scripted()) as client:
        for path, most in ((protocol.GENERATE, 406_016), (CHAT, 466_944), (protocol.PROMPT_LOGPROBS, 406_016)):
            reader, writer = await asyncio.open_connection(*address(client))
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100000000000\r\n\r\n" % path.encode()
            )
            assert b" 413 " in await asyncio.wait_for(reader.readline(), HANGS)
            assert f"larger than {most} bytes".encode() in await asyncio.wait_for(reader.readuntil(b"}"), HANGS)
            writer.close()


async def test_the_rest_of_a_body_that_was_refused_is_thrown_away_in_large_pieces(monkeypatch):
    pieces = []
    received = ClientConnection.data_received

    def counted(self, data):
        pieces.append(len(data))
        received(self, data)

    monkeypatch.setattr(ClientConnection, "data_received", counted)
    async with asking(scripted()) as client:
        answer = await client.post(CHAT, content=b" " * 10**7, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert (await client.get("/health")).status_code == 200  # over the same connection, or another one
    assert len(pieces) < 1000


@pytest.mark.parametrize("seconds", [0.0, 0.3])
async def test_what_is_not_http_is_refused_once(seconds):
    async with asking(scripted(), limits=ServerLimits(refusal_seconds=seconds)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(b"\0" * 100 + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), HANGS)
        assert answer.count(b"HTTP/1.1 400") == 1
        writer.close()


LONG_HEADS = {
    "a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 1_000_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
    "a path": b"GET /" + b"b" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("kind", LONG_HEADS)
async def test_a_head_that_is_too_long_is_answered_with_431_and_its_client_can_read_it(kind, seconds):
    """The client sends all of it before it reads: were the connection reset meanwhile, the answer could be lost."""
    async with asking(scripted(), limits=ServerLimits(refusal_seconds=seconds)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(LONG_HEADS[kind])
        await asyncio.wait_for(writer.drain(), HANGS)
        answer = await asyncio.wait_for(reader.read(), HANGS)  # to the end: a reset would raise
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"connection: close" in head.lower()
        assert body == b"the head of a request, or of a chunk, is longer than 16384 bytes"
        writer.close()


def head_of(size: int) -> bytes:
    """The head of a health check of so many bytes, after which the connection is closed."""
    begin, end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nA: ", b"\r\n\r\n"
    return begin + b"b" * (size - len(begin) - len(end)) + end


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["alone", "second"])
@pytest.mark.parametrize("cut", [0, 1000, 16_383])
@pytest.mark.parametrize(("size", "status"), [(16_384, b"200"), (16_385, b"431"), (20_000, b"431"), (70_000, b"431")])
async def test_a_head_may_have_as_many_bytes_as_the_limit_says_and_not_one_more(before, cut, size, status):
    """However it comes: in one piece or two, alone or behind another request."""
    async with asking(scripted()) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        head = head_of(size)
        writer.write(before + head[:cut])
        await asyncio.sleep(0)
        writer.write(head[cut:])
        answers = re.findall(rb"HTTP/1.1 (\d+) ", await asyncio.wait_for(reader.read(), HANGS))
        assert answers == [*([b"200"] if before else []), status]
        writer.close()


async def test_who_sends_on_for_ever_behind_a_refusal_is_hung_up_on():
    async with asking(scripted()) as client:
        _, writer = await asyncio.open_connection(*address(client))
        writer.write(b"\0" * 100 + b"\r\n\r\n")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(HANGS):
                while True:
                    writer.write(b"x" * 2**16)
                    await writer.drain()
        writer.close()


async def test_who_neither_reads_nor_leaves_behind_a_refusal_is_hung_up_on(monkeypatch):
    monkeypatch.setattr("verbatim.inference.http.connections._LINGER", 0.05)
    async with asking(scripted()) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(b"\0" * 100 + b"\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), HANGS)).startswith(b"HTTP/1.1 400 ")

        async def sends_on():
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(sends_on(), HANGS)
        writer.close()


async def test_what_is_not_http_in_a_body_ends_its_request_once(caplog):
    """It may be refused, or answered by its route before its body is read: one answer, and nothing in the log."""
    async with asking(scripted()) as client:
        for path in (b"/health", b"/nowhere", protocol.GENERATE.encode()):
            reader, writer = await asyncio.open_connection(*address(client))
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" % path
            )
            answer = await asyncio.wait_for(reader.read(), HANGS)
            assert answer.count(b"HTTP/1.1 ") == 1
            writer.close()
    assert caplog.records == []


async def test_a_server_that_stops_waits_for_nobody_it_has_refused():
    async with asking(scripted()) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(b"\0" * 100 + b"\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), HANGS)
    writer.close()


async def test_what_is_not_http_is_refused_as_late_as_any_other_mistake(monkeypatch):
    """Where refusals wait for ever, it has no answer, while another request has one."""
    heard, refuse = asyncio.Event(), ClientConnection.send_400_response
    monkeypatch.setattr(ClientConnection, "send_400_response", lambda self, text: (heard.set(), refuse(self, text)))
    async with asking(scripted(), limits=ServerLimits(refusal_seconds=FOREVER)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(b"\0" * 100 + b"\r\n\r\n")
        answer = asyncio.create_task(reader.read(1))
        await asyncio.wait_for(heard.wait(), HANGS)
        assert await is_healthy(client)
        assert not answer.done()
        writer.close()
        await asyncio.wait([answer])


async def test_a_body_in_chunks_is_asked_to_say_its_length():
    async def chunks():
        yield b'{"token_ids": [1]}'

    async with asking(scripted()) as client:
        answer = await client.post(protocol.GENERATE, content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 411


@pytest.mark.parametrize("path", [protocol.GENERATE, "/health", "/nowhere"])
async def test_thousands_of_tiny_chunks_are_not_read(path, monkeypatch):
    """The answer comes, and then the end: not after all of them have been taken apart."""
    pieces, received = [], ClientConnection.data_received
    monkeypatch.setattr(
        ClientConnection, "data_received", lambda own, data: (pieces.append(len(data)), received(own, data))
    )
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    async with asking(scripted(), limits=ServerLimits(refusal_seconds=0.3)) as client:
        reader, writer = await asyncio.open_connection(*address(client))
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 500_000)
        await closed(reader)
        assert sum(pieces) < 2**14
        writer.close()


@pytest.mark.parametrize("part", ["messages", "tools"])
async def test_a_conversation_that_no_context_holds_is_refused_without_rendering_it(part):
    rendered = []

    class Renderer(ByteRenderer):
        def render_ids(self, *args, **kwargs):
            rendered.append(args)
            return super().render_ids(*args, **kwargs)

    text = "x" * (400 * 256 + 1)
    body = conversation(text if part == "messages" else "hi")
    if part == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"description": text}}}]
    async with asking(scripted(), renderer=Renderer()) as client:
        said = await message(client, CHAT, body, 400)
        assert said.startswith(f"{part}: 102") and "a context of 400 tokens holds at most 102400" in said
        assert rendered == []
        assert "messages: 503 ids leave no room" in await message(client, CHAT, conversation("x" * 500), 400)


# ---- rendering


async def test_rendering_holds_up_no_other_request():
    renders, ends = threading.Event(), threading.Event()

    class Renderer(ByteRenderer):
        def render_ids(self, *args, **kwargs):
            renders.set()
            assert ends.wait(HANGS)
            return super().render_ids(*args, **kwargs)

    limits = only()
    async with asking(scripted(), renderer=Renderer(), limits=limits) as client:
        slow = asyncio.create_task(client.post(CHAT, json=conversation("hi"), timeout=HANGS))
        await until(renders.is_set)
        for _ in range(5):
            assert await is_healthy(client)
        assert not slow.done()
        ends.set()
        assert (await slow).status_code == 200


@pytest.mark.slow
async def test_in_processes_a_rendering_that_takes_long_holds_up_no_other(tmp_path):
    async with asking(scripted(), renderer=SlowRenderer(), limits=only(), chat_processes=2) as client:
        large = conversation(f"hang {tmp_path / 'hangs'} " + "x" * 2**14)
        slow = asyncio.create_task(client.post(CHAT, json=large, timeout=FOREVER))
        await until((tmp_path / "hangs").exists)
        small = await client.post(CHAT, json=conversation("hi"))  # the other process takes it meanwhile
        assert small.json()["choices"][0]["message"]["content"] == "yo"
        for text in ("exit", "raise it"):
            said = await message(client, CHAT, conversation(text), 503 if text == "exit" else 400)
            assert said.startswith("messages: ")
        answer = await client.post(CHAT, json=conversation("hi"))
        assert answer.json()["choices"][0]["message"]["content"] == "yo"
        assert not slow.done()
        slow.cancel()


@pytest.mark.slow
async def test_in_processes_a_rendering_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    """And another process takes the next one, for which there is time enough."""
    has_ended = threading.Event()

    def timeout(seconds: float) -> asyncio.Timeout:
        return asyncio.timeout(FOREVER if has_ended.is_set() else seconds)

    monkeypatch.setattr(render_pool, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))
    limits = only(render_seconds=0.5)
    async with asking(scripted(), renderer=SlowRenderer(), limits=limits, chat_processes=1) as client:
        said = await message(client, CHAT, conversation(f"hang {tmp_path / 'hangs'}"), 400)
        assert said == "messages: rendering took more than 0.5 s, which is the limit"
        has_ended.set()
        answer = await client.post(CHAT, json=conversation("hi"))
        assert answer.json()["choices"][0]["message"]["content"] == "yo"


async def test_a_renderer_that_cannot_travel_is_a_mistake_of_who_asks_for_processes():
    renderer = ByteRenderer()
    renderer.bridges = lambda: None  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot be recreated in another process"):
        async with serve_sampler(scripted(), renderer=renderer, chat_processes=1):
            pass


# ---- weights and names


@pytest.mark.slow
async def test_weights_are_taken_from_the_named_folder_only(tmp_path: Path):
    sampler, folder = scripted(), tmp_path / "weights"
    (folder / "step_1").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (folder / "link").symlink_to(tmp_path / "other")
    for key in (None, "sk-secret"):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with asking(sampler, weights_folder=folder, api_key=key) as client:
            for path in (tmp_path / "other", folder / ".." / "other", folder / "link", Path("/")):
                said = await message(client, protocol.WEIGHTS, {"path": str(path), "version": 1}, 403, **headers)
                assert "outside the folder" in said
            body = {"path": str(folder / "step_1"), "version": 1}
            assert (await client.post(protocol.WEIGHTS, json=body, headers=headers)).status_code == 200
    assert [path for path, _ in sampler.updates] == [folder / "step_1"] * 2


@pytest.mark.parametrize("path", ["\0", "a\0b", "\ud800", "x" * 5000])
async def test_a_path_that_is_none_is_refused_by_name(path):
    async with asking(scripted(failing_updates=frozenset({1})), api_key="k") as client:
        body = json.dumps({"path": path, "version": 1})
        headers = {"authorization": "Bearer k", "content-type": "application/json"}
        answer = await client.post(protocol.WEIGHTS, content=body, headers=headers)
        assert answer.status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3:1", 200),
        ("gpu.lan:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
async def test_without_a_key_a_request_calls_the_server_by_its_name(host, status):
    async with asking(scripted(), allow_hosts=["gpu.lan"]) as client:
        answer = await client.post(protocol.GENERATE, json={"token_ids": [1]}, headers={"host": host})
        assert answer.status_code == status
        if status == 403:
            assert "--allow-host" in answer.json()["error"]["message"]
    async with asking(scripted(), api_key="k") as client:
        headers = {"host": host, "authorization": "Bearer k"}
        assert (await client.post(protocol.GENERATE, json={"token_ids": [1]}, headers=headers)).status_code == 200


# ---- many at once


async def test_a_health_check_begins_before_the_requests_that_wait_and_what_hung_up_never_does(monkeypatch):
    monkeypatch.setattr("verbatim.inference.http.acceptor._BEGUN_AT_ONCE", 1)
    begun, done = [], asyncio.Event()

    class Noting(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            begun.append(data)
            if len(begun) == 7:
                done.set()

    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        clients = [socket.create_connection(listening.getsockname()) for _ in range(8)]
        for number, client in enumerate(clients):
            stack.enter_context(client)
            if number == 2:
                client.close()
            else:
                client.sendall(b"GET /health HTTP/1.1" if number == 6 else b"POST %d" % number)
        acceptor = Acceptor(listening, Noting, ConnectionTable(ServerLimits(), 100))
        async with asyncio.timeout(HANGS):
            await done.wait()
        acceptor.close()
    assert begun[0] == b"GET /health HTTP/1.1"
    assert begun[1:] == [b"POST 0", b"POST 1", b"POST 3", b"POST 4", b"POST 5", b"POST 7"]


async def test_connections_that_wait_are_closed_with_the_server(monkeypatch):
    monkeypatch.setattr("verbatim.inference.http.acceptor._BEGUN_AT_ONCE", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        table = ConnectionTable(ServerLimits(), 100)
        acceptor = Acceptor(listening, asyncio.Protocol, table)
        await until(lambda: table.num_queued)
        acceptor.close()
        async with asyncio.timeout(HANGS):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.slow
async def test_the_health_check_answers_beside_hundreds_of_requests_and_half_open_connections():
    sampler = scripted(trouble=lambda index, r: "hang")
    async with asking(sampler) as client:
        held = [await asyncio.open_connection(*address(client)) for _ in range(200)]
        many = httpx.AsyncClient(base_url=client.base_url, timeout=HANGS, limits=httpx.Limits(max_connections=None))
        async with many:
            calls = [asyncio.create_task(many.post(protocol.GENERATE, json={"token_ids": [1]})) for _ in range(100)]
            await until(lambda: sampler.num_in_flight == 100)
            assert await is_healthy(client)
            await sampler.close()
            assert {(await call).status_code for call in calls} == {200}
        for _, writer in held:
            writer.close()
