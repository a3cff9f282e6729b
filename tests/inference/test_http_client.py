"""The HTTP client: bodies bit for bit, bounded answers and deadlines, whose proxies and keys, and whole connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import math
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.core.errors import RecordError, SamplerFault, UsageError
from verbatim.core.types import StopReason
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.http import client
from verbatim.inference.http.client import ClientClosed, HttpClient, HttpResponse, decode, encode, read_json
from verbatim.inference.http.connection_settings import account_headers
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.openai import OpenAI
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
KEY = "sk-canary-0123456789"


@dataclass
class Server:
    """A bare HTTP/1.1 server of this event loop; `script(number, head, body)` gives the bytes of an answer.

    None closes the connection, as does a header `Breaks-Off` after the answer's bytes, which may be too few.
    """

    url: str = ""
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    open: int = 0


Script = Callable[[int, str, bytes], Awaitable[bytes | None]]


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Server]:
    server = Server()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        server.open += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.split("\r\n")
                        if line.lower().startswith("content-length:")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                server.heads.append(head)
                answer = await script(len(server.heads) - 1, head, body)
                writer.write(answer or b"")
                await writer.drain()
                if answer is None or b"Breaks-Off" in answer:
                    break
        server.open -= 1
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server


def http(body: bytes | str, status: int = 200, **headers: str) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    named = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode() + body


def always(answer: bytes | None) -> Script:
    async def script(number: int, head: str, body: bytes) -> bytes | None:
        return answer

    return script


@contextlib.asynccontextmanager
async def asking(server: Server, **settings: Any) -> AsyncIterator[HttpClient]:
    made = HttpClient(server.url, **{"request_timeout": HANGS, "max_retries": 3, **settings})
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.002)


def answer_of(body: bytes) -> HttpResponse:
    return HttpResponse("/", 200, body, {})


# ---- bodies


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
@settings(deadline=None)
def test_every_finite_float32_is_read_back_bit_for_bit(bits: list[int]):
    floats = np.array(bits, dtype=np.uint32).view(np.float32)
    floats = floats[np.isfinite(floats)]
    read = decode(answer_of(json.dumps(floats.tolist()).encode()))
    assert np.array(read, dtype=np.float32).tobytes() == floats.tobytes()


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None)
def test_a_double_is_read_as_the_nearest_to_what_is_written(value: float):
    for text in (repr(value), f"{value:.25e}"):
        (read,) = decode(answer_of(f"[{text}]".encode()))
        assert math.copysign(1, read) == math.copysign(1, value)
        assert read == value


@pytest.mark.parametrize("ids", [[5, 6, 2**31 - 1], [], [0]])
def test_ids_are_written_as_a_list_whatever_holds_them(ids: list[int]):
    spread = np.zeros((len(ids), 2), dtype=np.int32)
    spread[:, 0] = ids
    for array in (np.array(ids, dtype=np.int32), spread[:, 0], np.array(ids, dtype=np.int64), ids):
        assert json.loads(encode({"ids": array, "text": "é"})) == {"ids": ids, "text": "é"}


def test_what_is_hard_to_write_is_written_as_python_writes_it():
    assert json.loads(encode({"text": "\ud800", "seed": 2**70})) == {"text": "\ud800", "seed": 2**70}
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"seed": 2**70, "temperature": math.nan})


@pytest.mark.parametrize(
    ("text", "value"),
    [(b'"a\\ud800b"', "a\ud800b"), (b'"\xff"', "\ufffd"), (b"1" + b"0" * 400, 10**400), (b"[1e400]", [math.inf])],
)
def test_what_only_python_reads_is_read(text: bytes, value: Any):
    assert decode(answer_of(text)) == value


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"nul", b"[1,]", b"\x00"])
def test_what_is_no_json_is_a_value_error(text: bytes):
    with pytest.raises(ValueError):
        decode(answer_of(text))


@pytest.mark.parametrize("depth", [500, 900, 1_000])
async def test_a_deep_answer_is_a_fault_wherever_it_stands(depth: int):
    deep = "[" * depth + "]" * depth
    sample = SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(), seed=0)
    choice = '{{"choices": [{{"finish_reason": {}, "token_ids": {}}}]}}'
    for body in (deep, choice.format(deep, "[1]"), choice.format('"stop"', f"[{deep}]")):
        async with serving(always(http(body))) as server:
            sampler = HttpSampler(server.url, vocab_size=10, context_length=64, max_retries=0)
            with pytest.raises((SamplerFault, RecordError)):
                await sampler.generate(sample)
            with pytest.raises(SamplerFault):
                await sampler.prompt_logprobs(np.array([1, 2], np.int32))
            await sampler.close()


async def test_a_body_of_megabytes_arrives_whole():
    ids = np.arange(400_000, dtype=np.int32)

    async def count(number: int, head: str, body: bytes) -> bytes:
        return http(str(sum(json.loads(body)["ids"])))

    async with serving(count) as server, asking(server) as asked:
        assert await asked.ask("POST", "/", encode({"ids": ids}), read_json) == 399_999 * 200_000


# ---- bounds


@pytest.mark.parametrize("headers", [{}, {"Content_Encoding": "gzip"}])
async def test_an_answer_of_absurd_size_is_given_up_while_it_arrives(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Compressed, a small answer is as large."""
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100_000)
    body = b" " * 100_001
    failures: Counter[str] = Counter()
    async with serving(always(http(gzip.compress(body) if headers else body, **headers))) as server:
        async with asking(server) as asked:
            with pytest.raises(SamplerFault, match=r"the response exceeds 100,000 bytes$"):
                await asked.ask("POST", "/", b"{}", read_json, failures)
        assert len(server.heads) == 1
    assert failures == {"bad_answer": 1}


@pytest.mark.slow
async def test_a_body_that_trickles_is_over_its_deadline_though_each_byte_comes_in_time():
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    failures: Counter[str] = Counter()
    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        asked = HttpClient(url, request_timeout=0.4, max_retries=1)
        async with asyncio.timeout(HANGS):
            with pytest.raises(SamplerFault, match=r"no answer within 0.4 s \(2 tries\)"):
                await asked.ask("POST", "/", b"{}", read_json, failures)
        await asked.close()
    assert failures == {"timeout": 2}


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (None, "connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nBreaks-Off: yes\r\n\r\n[1", "connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "connection"),
        (b"nonsense\r\n\r\n", "connection"),
        (http("[1", Content_Encoding="gzip"), "connection"),
        (http("[1"), "bad_answer"),
        (http("", 503), "status_503"),
        (http("", 409), "status_409"),
    ],
)
async def test_what_may_pass_is_counted_by_its_kind_and_retried(broken: bytes | None, kind: str):
    async def script(number: int, head: str, body: bytes) -> bytes | None:
        if number < 2:
            return broken
        return http("[7]")

    failures: Counter[str] = Counter()
    async with serving(script) as server, asking(server) as asked:
        assert await asked.ask("POST", "/", b"{}", read_json, failures) == [7]
        assert len(server.heads) == 3
    assert failures == {kind: 2}


@pytest.mark.slow
async def test_an_answer_that_does_not_come_to_its_end_is_counted_and_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    """The first one stops in its middle. Once that is counted, the next one has all the time it takes."""
    timeouts: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        timeouts.append(seconds)
        return asyncio.timeout(HANGS if failures else seconds)

    async def script(number: int, head: str, body: bytes) -> bytes:
        return http("[7]") if failures else b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n[1"

    failures: Counter[str] = Counter()
    monkeypatch.setattr(client, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))
    async with serving(script) as server, asking(server, request_timeout=0.5) as asked:
        assert await asked.ask("POST", "/", b"{}", read_json, failures) == [7]
    assert failures == {"timeout": 1} and timeouts == [0.5, 0.5]


async def test_a_sampler_waits_as_long_as_the_server_says(monkeypatch: pytest.MonkeyPatch):
    async def script(number: int, head: str, body: bytes) -> bytes:
        return http("{}", 429, Retry_After="60") if number == 0 else http("[7]")

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    waits: list[float] = []
    async with serving(script) as server, asking(server) as asked:
        monkeypatch.setattr(client, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        assert await asked.ask("GET", "/", None, read_json) == [7]
    assert [60 < seconds < 60.1 for seconds in waits] == [True]


# ---- connections


async def test_cancelling_under_load_mixes_up_no_answers_and_leaves_no_connection_behind():
    """A connection that was given up at any moment is not used again: its answer would be taken for another's."""
    dice = random.Random(0)

    async def echo(number: int, head: str, body: bytes) -> bytes:
        await asyncio.sleep(dice.uniform(0, 0.02))
        return http(body)

    async with serving(echo) as server, asking(server) as asked:

        async def one(number: int) -> bool:
            """Whether it was answered; it may be cancelled on the way."""
            task = asyncio.create_task(asked.ask("POST", "/", b"[%d]" % number, read_json))
            if number % 2:
                await asyncio.sleep(dice.uniform(0, 0.03))
                task.cancel()
            try:
                assert await task == [number]
            except asyncio.CancelledError:
                return False
            return True

        for start in range(0, 600, 100):
            answered = await asyncio.gather(*map(one, range(start, start + 100)))
            assert all(answered[::2])
        assert len(server.heads) >= 300
    await until(lambda: not server.open)  # the server learns of it as it reads


async def test_answered_connections_are_used_again():
    async with serving(always(http("[7]"))) as server, asking(server) as asked:
        for _ in range(20):
            assert await asked.ask("POST", "/", b"{}", read_json) == [7]
        assert server.connections == 1


async def test_hanging_up_ends_what_is_under_way_and_the_next_request_connects_anew():
    async def script(number: int, head: str, body: bytes) -> bytes:
        if number == 0:
            await asyncio.Event().wait()
        return http("[7]")

    async with serving(script) as server, asking(server) as asked:
        task = asyncio.create_task(asked.ask("POST", "/", b"{}", read_json))
        await until(lambda: server.heads)
        await asked.hang_up()
        with pytest.raises(ClientClosed, match="this client was closed before"):
            await task
        assert await asked.ask("POST", "/", b"{}", read_json) == [7]
        sampler = HttpSampler(server.url, vocab_size=10, context_length=64)
        server.heads.clear()
        sample = SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(), seed=0)
        sampled = asyncio.create_task(sampler.generate(sample))
        await until(lambda: server.heads)
        await sampler.hang_up()
        assert (await sampled).stop_reason is StopReason.CANCELLED
        await sampler.close()
        with pytest.raises(SamplerFault, match="were closed"):
            await sampler.prompt_logprobs(np.array([1], np.int32))


@pytest.mark.slow
def test_a_client_that_was_never_closed_says_nothing_when_it_goes(caplog: pytest.LogCaptureFixture):
    async def ask_once() -> HttpClient:
        async with serving(always(http("[7]"))) as server:
            asked = HttpClient(server.url, request_timeout=HANGS, max_retries=0)
            assert await asked.ask("GET", "/", None, read_json) == [7]
            return asked

    caplog.set_level(logging.DEBUG)
    asked = asyncio.run(ask_once())
    gc.collect()  # what earlier tests left may say something
    caplog.clear()
    del asked
    gc.collect()
    assert caplog.text == ""


# ---- the world outside


async def test_a_remote_api_is_reached_through_the_proxy_of_the_environment_and_a_sampler_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    async with serving(always(http("[1]"))) as proxy, serving(always(http("[2]"))) as direct:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:proxy-canary@"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:proxy-canary@"))
        for settings, expected in (({"remote_api": True}, [1]), ({}, [2])):
            async with asking(direct, **settings) as asked:
                assert await asked.ask("GET", "/x", None, read_json) == expected
        assert proxy.heads[0].startswith(f"GET {direct.url}/x HTTP/1.1")
        assert "proxy-authorization: basic " in proxy.heads[0].lower()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with asking(direct, remote_api=True) as asked:
            assert await asked.ask("GET", "/x", None, read_json) == [2]


async def test_a_proxy_that_fails_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch):
    async def refuse(number: int, head: str, body: bytes) -> bytes:
        return http("bad credentials proxy-canary", 407)

    async with serving(refuse) as proxy:
        monkeypatch.setenv("no_proxy", "")
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", proxy.url.replace("//", "//me:proxy-canary@"))
            asked = HttpClient(f"{scheme}://127.0.0.1:9", request_timeout=HANGS, max_retries=0, remote_api=True)
            with pytest.raises(SamplerFault, match="407") as caught:
                await asked.ask("GET", "/", None, read_json)
            assert "canary" not in str(caught.value)
            await asked.close()


def test_a_socks_proxy_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("all_proxy", "socks5://me:proxy-canary@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(UsageError, match=r"socks5 proxy for api.test; expected an http proxy.*NO_PROXY=") as caught:
        HttpClient("http://api.test", request_timeout=1.0, max_retries=0, remote_api=True)
    assert "canary" not in str(caught.value)


async def test_a_key_that_a_server_quotes_is_in_no_message_and_follows_no_redirect_to_another_host():
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(serving(always(http(f"bad key {KEY}", 403))))
        redirect = http("", 307, Location=f"{other.url}/there")
        first = await stack.enter_async_context(serving(always(redirect)))
        for server, remote, said in (
            (other, False, r"status 403: bad key \[redacted\]$"),
            (first, True, "status 403"),
            (first, False, "status 307"),
        ):
            asked = await stack.enter_async_context(asking(server, api_key=KEY, remote_api=remote))
            with pytest.raises(SamplerFault, match=said):
                await asked.ask("POST", "/", b"{}", read_json)
    assert [KEY in head for head in (*first.heads, *other.heads)] == [True, True, True, False]


@pytest.mark.parametrize("cut", [270, 285, 292])
async def test_a_quote_that_ends_in_the_middle_of_the_key_does_not_show_its_beginning(cut: int):
    for body, status in (("-" * cut + KEY, 403), ("-" * (cut - 100) + KEY, 200)):
        async with serving(always(http(body, status))) as server, asking(server, api_key=KEY, max_retries=0) as asked:
            with pytest.raises(SamplerFault, match=r"--\[redacted\]") as caught:
                await asked.ask("POST", "/", b"{}", read_json)
        assert KEY[:8] not in str(caught.value)


async def test_the_account_of_the_environment_is_named_to_openais_own_server_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-1")
    assert account_headers("https://api.openai.com/v1") == {
        "OpenAI-Organization": "org-1",
        "OpenAI-Project": "project-1",
    }
    choice = '{"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}'
    async with serving(always(http(choice))) as server, OpenAI(model="m", base_url=server.url).connect() as connection:
        assert (await connection.complete({"model": "m", "messages": []}, Counter())).content == "4"
    assert "openai-" not in server.heads[0].lower()


@pytest.mark.parametrize("remote", [False, True])
async def test_certificates_are_checked(remote: bool, monkeypatch: pytest.MonkeyPatch):
    """The context, as aiohttp is given it."""
    made: list[Any] = []
    import aiohttp

    real = aiohttp.TCPConnector
    monkeypatch.setattr(aiohttp, "TCPConnector", lambda **kwargs: made.append(kwargs["ssl"]) or real(**kwargs))
    asked = HttpClient("https://127.0.0.1:9", request_timeout=HANGS, max_retries=0, remote_api=remote)
    with pytest.raises(SamplerFault, match="Connection error"):
        await asked.ask("GET", "/", None, read_json)
    await asked.close()
    (context,) = made
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


@pytest.mark.parametrize(
    "url",
    [
        None,
        3,
        b"http://h",
        "http://h:99999",
        "http://h:abc",
        "http://h:0",
        "http://[::1",
        "http://h h",
        "http://h\n",
        " http://h",
    ],
)
@pytest.mark.parametrize("make", [lambda url: HttpSampler(url), lambda url: OpenAI(model="m", base_url=url)])
def test_what_no_connection_can_be_made_to_is_refused_at_once(make, url):
    with pytest.raises(UsageError, match=r"url.* expected an address such as"):
        make(url)


def test_a_fragment_is_not_written_down():
    with pytest.raises(UsageError, match="url of h contains") as caught:
        HttpSampler("http://h/#key=secret-key")
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_retries": 1.5},
        {"max_retries": "3"},
        {"max_retries": -1},
        {"request_timeout": math.nan},
        {"request_timeout": None},
        {"request_timeout": 0},
    ],
)
@pytest.mark.parametrize("make", [HttpSampler, lambda url, **limits: OpenAI(model="m", base_url=url, **limits)])
def test_limits_with_which_no_request_could_be_made_are_refused_at_once(make, limits):
    with pytest.raises(UsageError, match="expected at least 0 retries and a timeout above 0"):
        make("http://h", **limits)


@pytest.mark.parametrize("key", ["sk-secret-key\n", "sk-secret key", "sk-secret-kéy", b"sk-secret-key"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_quoted(key):
    with pytest.raises(UsageError, match=r"the API key contains .*\.strip\(\)") as caught:
        HttpSampler("http://h", api_key=key)
    assert "secret" not in str(caught.value)
