"""Measures the processor time of a request over the gateway, compared with calling the sampler directly.

A client in a different process plays 64 concurrent sessions of 8 turns each over HTTP. The sampler answers immediately.
The first message is long, so that every request has a history of about 4,000 tokens. Two renderers are measured:
"bytes", a renderer of bytes whose cost is negligible, and "template", the chat template and tokenizer of a small model,
which renders the whole conversation for each turn. "direct" is the same number of completions from the sampler alone,
with prompts that are already rendered.

The matching of requests to sessions is also timed separately, for requests of 100 and of 1,000 messages, and among 1
and 1,000 sessions.

Prints one JSON line with milliseconds of processor time of this process per request, as medians over the repetitions.
Run: python benchmarks/gateway.py
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inspection.envcheck.byte_chat import VOCAB_SIZE, ByteChat, written
from verbatim.rollouts.gateway import Gateway
from verbatim.rollouts.gateway.threads import Threads

SESSIONS, TURNS, TOKENS = 64, 8, 4000
SAID = "This is an answer of about fifty characters, no more."

CLIENT = """
import asyncio, json, sys
import aiohttp

async def main():
    given = json.load(sys.stdin)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async def play(url, key):
            messages = [{"role": "user", "content": "x y " * (given["characters"] // 4)}]
            for turn in range(given["turns"]):
                async with http.post(url + "/chat/completions", json={"model": "m", "messages": messages},
                                     headers={"authorization": "Bearer " + key}) as answer:
                    assert answer.status == 200, await answer.text()
                    messages.append((await answer.json())["choices"][0]["message"])
                messages.append({"role": "user", "content": f"and then, {turn}?"})
        await asyncio.gather(*(play(*where) for where in given["episodes"]))

asyncio.run(main())
"""


async def over_gateway(sampler: ScriptedSampler, renderer: Any, characters: int, sessions: int) -> float:
    """Play the sessions over a gateway; returns milliseconds of processor time per request."""
    params = SamplingParams(max_tokens=100)
    async with Gateway(sampler, renderer, params=params) as gateway:
        episodes = [gateway.episode() for _ in range(sessions)]
        gc.collect()
        gc.freeze()  # as in a run, because a collection over all imports takes as long as hundreds of requests
        given = {"characters": characters, "turns": TURNS, "episodes": [(e.base_url, e.api_key) for e in episodes]}
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, stdin=subprocess.PIPE)
        began = time.process_time()
        await client.communicate(json.dumps(given).encode())
        spent = time.process_time() - began
        assert client.returncode == 0
        trajectories = [await episode.finish() for episode in episodes]
    assert all(len(t.turns) == TURNS and t.num_breaks == 0 for t in trajectories)
    return 1000 * spent / (sessions * TURNS)


async def directly(sampler: ScriptedSampler, sessions: int) -> float:
    """Request the same number of completions from the sampler directly; returns milliseconds of processor time per
    completion."""
    prompts = [np.zeros(TOKENS + 60 * turn, dtype=np.int32) for turn in range(TURNS)]

    async def play() -> None:
        for prompt in prompts:
            await sampler.generate(SampleRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=100), seed=0))

    began = time.process_time()
    await asyncio.gather(*(play() for _ in range(sessions)))
    return 1000 * (time.process_time() - began) / (sessions * TURNS)


def matching(num_messages: int, num_sessions: int) -> float:
    """The milliseconds to match a request with one session among `num_sessions`."""
    messages = [{"role": "user", "content": f"{n} " + "x" * 200} for n in range(num_messages)]
    sessions: list[Threads[int]] = [Threads() for _ in range(num_sessions)]
    for threads in sessions:
        threads.match([*messages, {"role": "user", "content": "first"}])
    times = []
    for _ in range(20):
        began = time.process_time()
        sessions[-1].match(messages)
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times)


def small_model(folder: Path) -> tuple[Any, int]:
    """Make a small model; returns the renderer of its chat template, and the size of its vocabulary."""
    from verbatim.config.schema import BuildConfig
    from verbatim.environments.guess_number import GuessNumber
    from verbatim.environments.resolve import corpus
    from verbatim.models.build import build_model
    from verbatim.models.loading import load_tokenizer
    from verbatim.models.renderers import create_renderer

    sizes = BuildConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512)
    build_model(folder, sizes, corpus(GuessNumber().demonstrations(200, 0)), seed=0)
    return create_renderer("template", load_tokenizer(folder)), sizes.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--characters", type=int, default=3600, help="of the first message, for the template")
    args = parser.parse_args()

    async def measure() -> dict[str, Any]:
        found: dict[str, list[float]] = {"direct": [], "bytes": [], "template": []}
        with tempfile.TemporaryDirectory() as folder:
            template, size = small_model(Path(folder) / "model")
            stop = template.stop_token_ids[0]
            said = [*template.tokenizer.encode(SAID), stop]
            for _ in range(args.repeat):
                plain = ScriptedSampler(
                    script=lambda _: np.array(written({"content": SAID}), np.int32),
                    vocab_size=VOCAB_SIZE,
                    context_length=100_000,
                )
                small = ScriptedSampler(
                    script=lambda _: np.array(said, np.int32), vocab_size=size, context_length=100_000
                )
                found["direct"].append(await directly(plain, args.sessions))
                found["bytes"].append(await over_gateway(plain, ByteChat(), TOKENS, args.sessions))
                found["template"].append(await over_gateway(small, template, args.characters, args.sessions))
        medians = {f"{name}_ms": round(statistics.median(times), 3) for name, times in found.items()}
        return {
            **medians,
            "bytes_tokens": len(plain.requests[-1].prompt_ids),
            "template_tokens": len(small.requests[-1].prompt_ids),
        }

    told = asyncio.run(measure())
    told |= {
        "matching_100_messages_ms": round(matching(100, 1), 3),
        "matching_1000_messages_ms": round(matching(1000, 1), 3),
        "matching_100_messages_among_1000_sessions_ms": round(matching(100, 1000), 3),
        "sessions": args.sessions,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
