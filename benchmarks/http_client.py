"""HTTP clients for exact token ids: requests per second, and the event loop's lag; the server answers at once.

The client has one core, the server another (a bare asyncio protocol in a process of its own, which reads a request's
length and writes a fixed answer of 128 sampled ids). 64 requests are under way at a time. Clients:

- `httpx_json`: httpx, a client for each connection (one client for all goes through every connection it has for each
  request), json.
- `httpx_orjson`: the same with orjson, which writes an int32 array as it is.
- `aiohttp_json`, `aiohttp_orjson`: aiohttp, one session.
- `sampler`: `HttpSampler.generate` as a rollout calls it: retries, deadlines, the checked completion.

Loads: prompts of 4,096 and of 32,768 ids. Asked of `sampler`: 1,000 and 200 requests per second, a lag below 50 ms at
the 99th percentile. `cpu_rate` counts requests per second of the client's own processor time and `cpu_lag_p99_ms` the
processor time that the loop took beyond the wait, which other work on the machine changes little. Also: milliseconds to
write 32,768 ids by json / orjson, and to read 4,096 logprobs.

The clients take turns within one run; rates are medians over the rounds, lags are of all rounds together, ratios are of
medians over `httpx_json`.
Prints one JSON line. python benchmarks/http_client.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import httpx
import numpy as np
import orjson

from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.http import protocol
from verbatim.inference.http.packed import pack
from verbatim.inference.http.sampler import HttpSampler

VOCAB = 151_936
SAMPLED = 128
UNDER_WAY = 64
LOADS = {"4k": (4_096, 1_200), "32k": (32_768, 300)}
"""Name: ids of a prompt, requests in one round."""
EVERY = 0.005
"""Seconds between two looks at the clock."""

Generate = Callable[[Any], Awaitable[Any]]


# ---- the server


class Answering(asyncio.Protocol):
    """Answers every request at once, whatever it asks."""

    def __init__(self, answer: bytes) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            len(answer),
            answer,
        )
        self.head = b""
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.left:
            self.head += data
            head, found, rest = self.head.partition(b"\r\n\r\n")
            if not found:
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self.head, self.left, data = b"", int(length), rest
        self.left -= len(data)
        if not self.left:
            self.transport.write(self.answer)  # type: ignore[attr-defined]


def answer() -> bytes:
    """128 sampled ids as our server writes them."""
    rng = np.random.default_rng(0)
    ours = {"policy_versions": None, "policy_version": 3, "seed": 0, "queued_seconds": 0.0, "generated_seconds": 0.1}
    choice = {
        "index": 0,
        "token_ids": None,
        "logprobs": None,
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": SAMPLED}],
    }
    strings = pack(rng.integers(0, VOCAB, SAMPLED, dtype=np.int32), -rng.random(SAMPLED, dtype=np.float32))
    return json.dumps({"choices": [choice], "packed": strings, "verbatim": ours}).encode()


def serve(core: int, port: Connection) -> None:
    """Until the process is ended."""
    pin(core)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Answering(answer()), "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


# ---- the clients


def body_of(ids: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_tokens": SAMPLED, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 1}
    return {"token_ids": ids, "sampling_params": sampling, "verbatim": {"session": "a", "seed": 1}}


def by_json(ids: Any) -> bytes:
    return json.dumps(body_of(ids.tolist()), separators=(",", ":")).encode()


def by_orjson(ids: Any) -> bytes:
    return orjson.dumps(body_of(ids), option=orjson.OPT_SERIALIZE_NUMPY)


@contextlib.asynccontextmanager
async def over_httpx(url: str, write: Callable[[Any], bytes], read: Callable[[bytes], Any]) -> AsyncIterator[Generate]:
    idle = [httpx.AsyncClient(limits=httpx.Limits(max_connections=1), trust_env=False) for _ in range(UNDER_WAY)]

    async def generate(ids: Any) -> Any:
        client = idle.pop()
        response = await client.post(url + protocol.GENERATE, content=write(ids))
        idle.append(client)
        return read(response.content)

    yield generate
    for client in idle:
        await client.aclose()


@contextlib.asynccontextmanager
async def over_aiohttp(
    url: str, write: Callable[[Any], bytes], read: Callable[[bytes], Any]
) -> AsyncIterator[Generate]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def generate(ids: Any) -> Any:
            async with session.post(url + protocol.GENERATE, data=write(ids)) as response:
                return read(await response.read())

        yield generate


@contextlib.asynccontextmanager
async def over_sampler(url: str) -> AsyncIterator[Generate]:
    sampler = HttpSampler(url, context_length=2**20, vocab_size=VOCAB)
    params = SamplingParams(max_tokens=SAMPLED)

    async def generate(ids: Any) -> Any:
        completion = await sampler.generate(SampleRequest(prompt_ids=ids, params=params, seed=1))
        assert len(completion.ids) == SAMPLED
        return completion

    yield generate
    await sampler.close()


CLIENTS: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Generate]]] = {
    "httpx_json": lambda url: over_httpx(url, by_json, json.loads),
    "httpx_orjson": lambda url: over_httpx(url, by_orjson, orjson.loads),
    "aiohttp_json": lambda url: over_aiohttp(url, by_json, json.loads),
    "aiohttp_orjson": lambda url: over_aiohttp(url, by_orjson, orjson.loads),
    "sampler": over_sampler,
}


# ---- one round


Lags = list[tuple[float, float]]
"""Seconds of the clock and of the processor that the loop took beyond the wait."""


async def measure(client: str, url: str, prompts: list[Any], requests: int, lags: Lags) -> dict[str, float]:
    """Requests per second, of the clock and of the processor."""
    gc.collect()
    gc.freeze()  # what the client before left is not looked through again
    async with CLIENTS[client](url) as generate:
        left = iter(range(requests))

        async def keep_asking() -> None:
            for number in left:
                await generate(prompts[number % len(prompts)])

        await asyncio.gather(*(generate(prompts[0]) for _ in range(UNDER_WAY)))  # the connections
        looking = asyncio.create_task(look_at_the_clock(lags))
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(keep_asking() for _ in range(UNDER_WAY)))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        looking.cancel()
    return {"rate": requests / seconds, "cpu_rate": requests / cpu}


async def look_at_the_clock(lags: Lags) -> None:
    while True:
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(EVERY)
        worked = max(0.0, time.process_time() - cpu - EVERY)
        lags.append((time.perf_counter() - began - EVERY, worked))


def figures(results: list[dict[str, float]], base: list[dict[str, float]], lags: Lags) -> dict[str, float]:
    made = {}
    for name, ratio in (("rate", "ratio"), ("cpu_rate", "cpu_ratio")):
        median, other = (statistics.median(result[name] for result in each) for each in (results, base))
        made |= {name: round(median, 1), ratio: round(median / other, 2)}
    for name, seconds in zip(("lag_p99_ms", "cpu_lag_p99_ms"), zip(*lags, strict=True), strict=True):
        made[name] = round(1e3 * sorted(seconds)[int(0.99 * len(seconds))], 1)
    return made


def milliseconds(work: Callable[[], Any]) -> float:
    took = []
    for _ in range(31):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(took), 3)


def codecs() -> dict[str, float]:
    """Milliseconds of writing one long prompt, and of reading one long completion's logprobs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, 32_768, dtype=np.int32)
    logprobs = json.dumps((-rng.random(4_096, dtype=np.float32)).tolist()).encode()
    return {
        "write_32k_json": milliseconds(lambda: by_json(ids)),
        "write_32k_orjson": milliseconds(lambda: by_orjson(ids)),
        "read_4k_json": milliseconds(lambda: json.loads(logprobs)),
        "read_4k_orjson": milliseconds(lambda: orjson.loads(logprobs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    mine, theirs = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(1, theirs), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    pin(0)
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {"ms": codecs()}
    for load, (length, requests) in LOADS.items():
        prompts = [rng.integers(0, VOCAB, length, dtype=np.int32) for _ in range(16)]
        runs: dict[str, list[dict[str, float]]] = {client: [] for client in CLIENTS}
        lags: dict[str, Lags] = {client: [] for client in CLIENTS}
        for _ in range(rounds):
            for client, results in runs.items():
                results.append(asyncio.run(measure(client, url, prompts, requests, lags[client])))
        found[load] = {client: figures(results, runs["httpx_json"], lags[client]) for client, results in runs.items()}
    server.terminate()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
