"""Measures how long a healthy client of `verbatim serve` waits during each class of attack, compared with the client
alone.

There are three processes: a server with a tiny model, a healthy client, and an attacker. The healthy client sends one
request for 16 tokens after the other, each over a new connection. The attacker usually has at least 8 connections, each
of which sends the next request as soon as it is answered. For each class of attack, the healthy client is measured
alone and then during the attack, `--rounds` times in turn.

Prints a line for each class, and one JSON line. `ratio` is the median latency during the attack, divided by the median
latency alone (required: at most 2 in every class). `p99` is the 99th percentile of the latency during the attack, in
seconds (required: below 1). `health` is the longest request of /health. All processes share the processor, so the
figures include the attacker's share. Run the benchmark on a machine that does nothing else:
python benchmarks/server_attacks.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GENERATE, CHAT, LOGPROBS = "/inference/v1/generate", "/v1/chat/completions", "/verbatim/v1/prompt_logprobs"
CONTEXT = 2048
Address = tuple[str, int]


def request(path: str, body: bytes, *, length: int | None = None, more: str = "") -> bytes:
    """The bytes of an HTTP request."""
    size = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {size}\r\n\r\n"
    ).encode() + body


def tokens(ids: list[int], **params: Any) -> bytes:
    return json.dumps({"token_ids": ids, "sampling_params": params}).encode()


def chat(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()


# ---- attacks


async def ask(address: Address, data: bytes) -> None:
    """Send a request, and read the answer to its end."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", head.lower())
            await reader.readexactly(int(found[1]) if found else 0)
    finally:
        writer.close()


async def again_and_again(address: Address, data: bytes) -> None:
    while True:
        with contextlib.suppress(OSError):
            await ask(address, data)


async def hold(address: Address, start: bytes, drip: bytes = b"") -> None:
    """Open a connection, send `start`, and then only `drip` from time to time. When the server closes the connection,
    start again."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(start)
            while not reader.at_eof():
                writer.write(drip)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(100), 0.5)
            writer.close()


async def come_and_go(address: Address) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*address)
            writer.close()
            await asyncio.sleep(0)


def several(count: int, make: Callable[[Address], Awaitable[None]]) -> Callable[[Address], list[Awaitable[None]]]:
    return lambda address: [make(address) for _ in range(count)]


def repeated(data: bytes, count: int = 8) -> Callable[[Address], list[Awaitable[None]]]:
    return several(count, lambda address: again_and_again(address, data))


CHUNKED = (
    f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
).encode() + b"1\r\n[\r\n" * 100_000
ATTACKS: dict[str, Callable[[Address], list[Awaitable[None]]]] = {
    "a million stop ids": repeated(request(GENERATE, tokens([1], max_tokens=1, stop_token_ids=[2] * 10**6))),
    "4096 stop ids": repeated(request(GENERATE, tokens([1], max_tokens=1, stop_token_ids=[2] * 4096))),
    "100 kB of angles": repeated(request(CHAT, chat("<" * 100_000))),
    "512 kB of angles": repeated(request(CHAT, chat("<" * 500_000))),
    "10 MB of prose": repeated(request(CHAT, chat("any words " * 10**6))),
    "small conversations": repeated(request(CHAT, chat("hi"))),
    "wrong fields": repeated(request(GENERATE, tokens([1], temperature="hot"))),
    "nested JSON": repeated(request(GENERATE, b"[" * 100_000)),
    "long lists": repeated(request(GENERATE, tokens([1] * 100_000))),
    "prompts of a whole context": repeated(request(GENERATE, tokens([3] * (CONTEXT - 2), max_tokens=1)), 2),
    "logprobs of a whole context": repeated(request(LOGPROBS, json.dumps({"token_ids": [3] * CONTEXT}).encode()), 2),
    "not HTTP": repeated(b"\0" * 100 + b"\r\n\r\n"),
    "chunks of one byte": repeated(CHUNKED),
    "1100 half-open connections": several(1100, lambda address: hold(address, b"")),
    "heads that drip": several(200, lambda address: hold(address, b"GET /health HTTP/1.1\r\n", b"a")),
    "bodies that drip": several(200, lambda address: hold(address, request(GENERATE, b"", length=9999), b" ")),
    "connections that come and go": several(8, come_and_go),
    "2000 requests at a time": repeated(request(GENERATE, tokens([1, 2], max_tokens=2)), 2000),
}


def attack(address: Address, name: str) -> None:
    """Run an attack until the process is ended."""
    os.nice(5)  # reduces the effect that the attacker's use of the processor has on the figures
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> None:
        await asyncio.gather(*ATTACKS[name](address))

    asyncio.run(run())


# ---- the healthy client


def timed(address: Address, method: str, path: str, body: bytes | None) -> float:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(*address, timeout=120)
    connection.request(method, path, body, {"Content-Type": "application/json", "Host": "localhost"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path} answered the healthy client with {answer.status}")
    return time.perf_counter() - began


def watch(address: Address, seconds: float) -> tuple[list[float], float]:
    """Act as the healthy client; returns the latencies of its requests, and the longest health check, in seconds."""
    found, health, end = [], 0.0, time.perf_counter() + seconds
    while (now := time.perf_counter()) < end or (len(found) < 20 and now < end + 30):
        found.append(timed(address, "POST", GENERATE, tokens([1, 2, len(found) % 50], max_tokens=16)))
        if len(found) % 10 == 0:
            health = max(health, timed(address, "GET", "/health", None))
    return found, health


# ---- server and measurement


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[int, Address]]:
    """Run `verbatim serve` with a model of some ten thousand weights while the block runs. Yields its process id and
    address."""
    from verbatim.config.schema import BuildConfig
    from verbatim.models.build import build_model

    sizes = BuildConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=64,
        vocab_size=512,
        context_length=CONTEXT,
    )
    build_model(folder / "tiny", sizes, ["any words that a tokenizer can be made of, again and again"] * 20, seed=0)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "verbatim.cli",
            "serve",
            str(folder / "tiny"),
            "--port",
            "0",
            "--device",
            "cpu",
            "--threads",
            "1",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().split(" at ")[1].split()[0])
        assert url.hostname is not None and url.port is not None
        yield process.pid, (url.hostname, url.port)
    finally:
        process.terminate()
        process.wait(60)


def measure(address: Address, name: str, seconds: float, rounds: int) -> dict[str, float]:
    alone: list[float] = []
    beside: list[float] = []
    ratios, health = [], 0.0
    for _ in range(rounds):
        before, _ = watch(address, seconds)
        attacker = multiprocessing.get_context("spawn").Process(target=attack, args=(address, name), daemon=True)
        attacker.start()
        time.sleep(2.0)
        try:
            found, longest = watch(address, seconds)
        finally:
            attacker.kill()
            attacker.join()
        time.sleep(1.0)  # let the requests that the attacker left behind end
        alone += before
        beside += found
        ratios.append(statistics.median(found) / statistics.median(before))
        health = max(health, longest)
    p99 = sorted(beside)[min(len(beside) - 1, round(0.99 * len(beside)))]
    return {
        "ratio": round(statistics.median(ratios), 2),
        "alone": round(statistics.median(alone), 4),
        "beside": round(statistics.median(beside), 4),
        "p99": round(p99, 3),
        "health": round(health, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (5)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each class (3)")
    parser.add_argument("--only", help="classes whose name holds this")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (_, address):
        watch(address, 1.0)
        for name in ATTACKS:
            if args.only is None or args.only in name:
                results[name] = measure(address, name, args.seconds, args.rounds)
                print(f"{name:<32} {results[name]}", file=sys.stderr, flush=True)
    figures = ("ratio", "p99", "health")
    worst = {f"worst_{figure}": max(found[figure] for found in results.values()) for figure in figures}
    print(json.dumps({**worst, "classes": results}))


if __name__ == "__main__":
    main()
