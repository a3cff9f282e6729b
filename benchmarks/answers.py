"""Measures what the answer to a turn of 1,533 sampled tokens costs the client that reads it and the vLLM that writes
it.

Two forms of the answer are compared: vLLM's own form, which names every token beside its logprob, and the packed form
(`verbatim.inference.http.packed`).

- `client`: microseconds of processor time that `HttpSampler.generate` takes for a turn with a prompt of 2,048 ids,
  while 16 requests are in flight. The server is a separate process that writes a fixed answer immediately. `bytes` is
  the size of the answer.
- `server` (only with `--python`): milliseconds of processor time for a turn in vLLM's API server, over all its threads:
  reading the request, following 1,533 tokens, writing the answer. The engine is a different process and is not
  included. The model is tiny, and 16 requests are in flight.

The two forms are measured in turns. Figures are medians over the rounds; `ratio` is the figure of vLLM's own form
divided by that of the packed form. Prints one JSON line.
Run: python benchmarks/answers.py [--python VLLM_ENVIRONMENT/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from http_client import Answering
from verbatim.config.schema import BuildConfig
from verbatim.core.types import StopReason
from verbatim.inference import Completion, SampleRequest, SamplingParams
from verbatim.inference.http import completions, protocol
from verbatim.inference.http.client import HttpClient, encode, read_json
from verbatim.inference.http.packed import PACKED, pack
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.models.build import random_model
from verbatim.models.loading import save_model
from verbatim.models.trained_tokenizer import build_tokenizer

TOKENS, PROMPT, VOCAB = 1_533, 2_048, 151_936
AT_ONCE = 16
FORMS = ("vllm", "packed")


# ---- the client


def answer(form: str) -> bytes:
    """The body of vLLM 0.32's answer to a turn, in one of the two forms."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, TOKENS, dtype=np.int32)
    logprobs = -rng.random(TOKENS, dtype=np.float32) * 3
    entries = [
        {"token_id": token, "logprob": logprob, "rank": 1}
        for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    content = [{**entry, "top_logprobs": [entry]} for entry in entries]
    is_packed = form == "packed"
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None if is_packed else ids.tolist(),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "3", "start": 0, "end": TOKENS}],
        "logprobs": None if is_packed else {"content": content},
    }
    usage = {
        "prompt_tokens": PROMPT,
        "total_tokens": PROMPT + TOKENS,
        "completion_tokens": TOKENS,
        "prompt_tokens_details": {"cached_tokens": 1_920},
    }
    body = {
        "request_id": "generate-tokens-1",
        "model": "policy",
        "created": 1,
        "usage": usage,
        "prompt_logprobs": None,
        "output_mode": "tokens",
        "choices": [choice],
        **({PACKED: pack(ids, logprobs)} if is_packed else {}),
    }
    return json.dumps(body, separators=(",", ":")).encode()


def serve(port: Connection) -> None:
    """Serve both forms of the answer, each on its own port, until the process is ended."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for form in FORMS:
            said = answer(form)
            server = await loop.create_server(lambda said=said: Answering(said), "127.0.0.1", 0)
            port.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def read_turns(url: str, turns: int) -> float:
    """Request turns from the server; returns microseconds of processor time per turn."""
    sampler = HttpSampler(
        url, context_length=2**16, vocab_size=VOCAB, policy_version=0, ours=False, processed_logprobs=True
    )
    ids = np.random.default_rng(1).integers(0, VOCAB, PROMPT, dtype=np.int32)
    request = SampleRequest(prompt_ids=ids, params=SamplingParams(max_tokens=TOKENS), seed=1)

    async def read(count: int) -> None:
        for _ in range(count):
            found: Completion = await sampler.generate(request)
            assert len(found.ids) == TOKENS and found.logprobs is not None and found.stop_reason is StopReason.STOP

    gc.collect()
    gc.freeze()  # later collections skip imported objects
    await asyncio.gather(*(read(1) for _ in range(AT_ONCE)))  # opens the connections
    began = time.process_time()
    await asyncio.gather(*(read(turns // AT_ONCE) for _ in range(AT_ONCE)))
    took = time.process_time() - began
    await sampler.close()
    return took / (turns // AT_ONCE * AT_ONCE) * 1e6


def measure_client(rounds: int, turns: int) -> dict[str, Any]:
    mine, theirs = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    urls = {form: f"http://127.0.0.1:{mine.recv()}" for form in FORMS}
    took: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        for form, url in urls.items():
            took[form].append(asyncio.run(read_turns(url, turns)))
    server.terminate()
    return {**figures(took, "us"), "bytes": {form: len(answer(form)) for form in FORMS}}


def figures(took: dict[str, list[float]], unit: str) -> dict[str, Any]:
    medians = {form: statistics.median(values) for form, values in took.items()}
    return {
        **{f"{form}_{unit}": round(value, 2) for form, value in medians.items()},
        "ratio": round(medians["vllm"] / medians["packed"], 2),
    }


# ---- the server


def processor_seconds(pid: int) -> float:
    """The user and system time of a process in seconds, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(subreaper: int | None) -> int:
    """The process id of the server that a subreaper has started."""
    (server,) = Path(f"/proc/{subreaper}/task/{subreaper}/children").read_text().split()
    return int(server)


async def measure_server(python: str, rounds: int) -> dict[str, Any]:
    """Start a vLLM server, and measure its processor time for both forms."""
    with tempfile.TemporaryDirectory() as name:
        length = 2 * PROMPT
        texts = ["hello world 123\n", "a longer text\n"] * 20
        tokenizer = build_tokenizer(texts, vocab_size=320, context_length=length)
        sizes = BuildConfig(
            hidden_size=64,
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            intermediate_size=64,
            vocab_size=320,
            context_length=length,
        )
        save_model(random_model(sizes, tokenizer, 0), tokenizer, Path(name) / "model")
        settings = VllmSettings(python=python, args=("--enforce-eager",), env={"VLLM_CPU_KVCACHE_SPACE": "1"})
        process = make_process(
            settings,
            0,
            model=Path(name) / "model",
            port=free_port(),
            context_length=length,
            logs=Path(name),
            num_threads=1,
        )
        await process.start(600.0)
        try:
            server = child_of(process.pid)
            client = HttpClient(process.url, request_timeout=600, max_retries=0)
            took: dict[str, list[float]] = {form: [] for form in FORMS}
            for number in range(rounds + 1):
                for form in FORMS:
                    seconds = await one_round(client, server, form)
                    if number:  # the first round warms up
                        took[form].append(seconds)
            await client.close()
        finally:
            await process.stop()
    return figures(took, "ms")


async def one_round(client: HttpClient, server: int, form: str) -> float:
    """Send a round of requests; returns milliseconds of the API server's processor time per turn."""
    ids = np.random.default_rng(1).integers(0, 100, PROMPT, dtype=np.int32)
    request = SampleRequest(prompt_ids=ids, params=SamplingParams(max_tokens=TOKENS), seed=1)
    body = completions.request_body(request, "policy")
    body[protocol.OURS][PACKED] = form == "packed"
    before = processor_seconds(server)
    answers = await asyncio.gather(
        *(client.ask("POST", protocol.GENERATE, encode(body), read_json) for _ in range(AT_ONCE))
    )
    took = processor_seconds(server) - before
    for found in answers:
        assert (PACKED in found) == (form == "packed")
        assert len(completions.read_completion(found)[0].ids) == TOKENS
    return took / AT_ONCE * 1e3


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=320, help="in one round, of the client's part")
    parser.add_argument("--python", help="of an environment with vLLM")
    args = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "answers", "tokens": TOKENS}
    found["client"] = measure_client(args.rounds, args.turns)
    if args.python is not None:
        found["server"] = asyncio.run(measure_server(args.python, args.rounds))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
