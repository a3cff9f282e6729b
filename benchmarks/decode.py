"""How fast the embedded sampler decodes a model of a million parameters, and what deterministic mode costs.

Prints one JSON line. Run: python benchmarks/decode.py --slots 64 --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from verbatim.config.schema import InferenceConfig
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.torch_engine import TorchSampler


def build(folder: Path, vocab_size: int) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
    )).save_pretrained(folder)  # fmt: skip
    return folder


def request(ids: np.ndarray, seed: int, max_tokens: int) -> SampleRequest:
    return SampleRequest(prompt_ids=ids, params=SamplingParams(max_tokens=max_tokens), seed=seed, session=str(seed))


async def decode_rate(sampler: TorchSampler, slots: int, prompt: int, tokens: int) -> float:
    """Sampled tokens per second of wall time while every slot decodes and every prompt is cached."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, sampler.vocab_size, prompt).astype(np.int32) for _ in range(slots)]
    first = await asyncio.gather(*(sampler.generate(request(p, i, 1)) for i, p in enumerate(prompts)))
    prompts = [np.concatenate([p, c.ids]) for p, c in zip(prompts, first, strict=True)]
    began = time.perf_counter()
    await asyncio.gather(*(sampler.generate(request(p, i, tokens)) for i, p in enumerate(prompts)))
    return slots * tokens / (time.perf_counter() - began)


async def measure(folder: Path, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Rates of the fast and of the deterministic mode, taken in turns so that a busy machine slows both."""
    samplers = [
        TorchSampler(
            folder,
            config=InferenceConfig(max_batch_size=args.slots, deterministic=deterministic, device=args.device),
            context_length=2048,
            num_threads=args.threads,
        )
        for deterministic in (False, True)
    ]
    rates: tuple[list[float], list[float]] = ([], [])
    for sampler in samplers:
        await decode_rate(sampler, args.slots, 8, 8)  # warms up
    for _ in range(args.repeats):
        for sampler, into in zip(samplers, rates, strict=True):
            into.append(await decode_rate(sampler, args.slots, args.prompt, args.tokens))
    for sampler in samplers:
        await sampler.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fast_rates, exact_rates = asyncio.run(measure(build(Path(folder), args.vocab_size), args))
    fast, exact = statistics.median(fast_rates), statistics.median(exact_rates)
    print(json.dumps({
        "benchmark": "decode",
        "tokens_per_second": round(fast),
        "best_tokens_per_second": round(max(fast_rates)),
        "deterministic_tokens_per_second": round(exact),
        "deterministic_ratio": round(statistics.median(e / f for e, f in zip(exact_rates, fast_rates, strict=True)), 3),
        "slots": args.slots,
        "context": [args.prompt, args.prompt + args.tokens],
        "threads": args.threads or torch.get_num_threads(),
        "vocab_size": args.vocab_size,
        "device": args.device,
        "repeats": args.repeats,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
