"""Compares HTTP clients for exact token ids by requests per second and by the lag of the event loop. The server answers
immediately.

Client and server have one core each. The server is a plain asyncio protocol in a separate process, which reads the
length of a request and writes a fixed answer of 128 sampled ids. 64 requests are in flight at a time. The clients:

- `httpx_json`: httpx with json. There is one client object per connection, because a shared one searches all its
  connections for each request.
- `httpx_orjson`: the same with orjson, which writes int32 arrays directly.
- `aiohttp_json`, `aiohttp_orjson`: aiohttp with one session.
- `sampler`: `HttpSampler.generate` as rollouts call it, with retries, deadlines and checks of the completion.

There are two loads, with prompts of 4,096 and of 32,768 ids. `sampler` is required to reach 1,000 and 200 requests per
second, with a lag below 50 ms at the 99th percentile. `cpu_rate` is the number of requests per second of the client's
own processor time. `cpu_lag_p99_ms` is the processor time for which the event loop was late. Other work on the machine
changes these two only a little. `ms` has the milliseconds that json and orjson take to write 32,768 ids, and to read
4,096 logprobs.

The clients take turns. Rates are medians over the rounds, lags are percentiles over all rounds together, and ratios are
relative to the median of `httpx_json`. Prints one JSON line.
Run: python benchmarks/http_client.py
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
"""By name of the load: the number of ids in a prompt, and the number of requests in a round."""
EVERY = 0.005
"""Seconds between two wake-ups of the task that measures the lag."""

Generate = Callable[[Any], Awaitable[Any]]


# ---- the server


class Answering(asyncio.Protocol):
    """Answers every request immediately with the same answer."""

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
    """The body of an answer with 128 sampled ids, as our server writes it."""
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
    """Serve on this core until the process is ended."""
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
"""For each wake-up, the seconds by which it was late: in wall-clock time and in processor time."""


async def measure(client: str, url: str, prompts: list[Any], requests: int, lags: Lags) -> dict[str, float]:
    """Run one round of a client; returns requests per second of wall-clock time and of processor time."""
    gc.collect()
    gc.freeze()  # later collections skip what the previous client left
    async with CLIENTS[client](url) as generate:
        left = iter(range(requests))

        async def keep_asking() -> None:
            for number in left:
                await generate(prompts[number % len(prompts)])

        await asyncio.gather(*(generate(prompts[0]) for _ in range(UNDER_WAY)))  # opens the connections
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
    """The milliseconds to write one long prompt, and to read the logprobs of one long completion."""
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
