"""Compares the embedded sampler with the ways of `transformers` to sample a batch, on multi-turn episodes of different
lengths.

Every engine plays the same episodes: the same opening prompts, and for each turn the same numbers of sampled tokens and
of tool tokens. At most `--concurrency` episodes are in flight; when one ends, the next one starts. Our sampler runs one
asyncio task per episode. The engines of `transformers` are:

- `padded`: one call of `generate` for the next turn of all episodes in flight, with whole prompts padded on the left. A
  call ends when its longest completion ends.
- `padded_cached`: the same, but keys and values are kept between calls, so that only new tokens are computed. This
  benchmark repacks the rows of the cache between two calls, which `generate` does not do by itself.
- `continuous`: the continuous batching of `transformers`, with one request per turn. If it cannot run, the reason is
  printed instead of a rate.

All engines return the logprob of every sampled token. The engines take turns. Prints one JSON line; ratios are medians
over the repetitions. Run: python benchmarks/engine.py --threads 1

With `--short`, which takes less than 3 minutes, only our sampler and `padded_cached` play, 64 episodes three times.
`--bfloat16` adds our sampler with `dtype = "bfloat16"`. `--model` selects a different model from the demo's: a folder,
or a name in `verbatim models`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig
from transformers.utils import logging as transformers_logging

from verbatim.config import load_config
from verbatim.environments.guess_number import GuessNumber
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.build import build_model
from verbatim.models.catalog import folder_of
from verbatim.models.trained_tokenizer import chat_text

CONTEXT = 2048
RECIPE = Path(__file__).parents[1] / "recipes" / "guess_number.toml"

Ids = np.ndarray[Any, np.dtype[np.int32]]
Engine = Callable[["Sequence[Script]"], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script of an episode, which does not depend on the sampled tokens."""

    opening: Ids
    """The ids of the first prompt."""
    lengths: tuple[int, ...]
    """Number of tokens that each turn samples."""
    answers: tuple[Ids, ...]
    """The ids of the tool's answer after each turn except the last."""
    seed: int
    """The seed for sampling, which also identifies the episode."""

    def prompt(self, turn: int, before: Ids, sampled: Ids) -> Ids:
        """The prompt of a turn, made from the previous turn's prompt and the tokens sampled in the previous turn."""
        return self.opening if turn == 0 else np.concatenate([before, sampled, self.answers[turn - 1]])


def write_scripts(count: int, vocab_size: int, seed: int) -> list[Script]:
    """Draw scripts with opening prompts of 48 to 150 tokens, 1 to 8 turns of 4 to 128 sampled tokens, and answers of 8
    to 64 tokens."""
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> Ids:
        return rng.integers(0, vocab_size, rng.integers(low, high + 1)).astype(np.int32)

    scripts = []
    for index in range(count):
        turns = int(rng.integers(1, 9))
        scripts.append(
            Script(
                opening=text(48, 150),
                lengths=tuple(int(n) for n in rng.integers(4, 129, turns)),
                answers=tuple(text(8, 64) for _ in range(turns - 1)),
                seed=1000 * seed + index,
            )
        )
    return scripts


# ---- ours


async def play_ours(sampler: TorchSampler, scripts: Sequence[Script], concurrency: int) -> None:
    """Play with the embedded sampler, with one task per episode as in rollouts."""
    places = asyncio.Semaphore(concurrency)

    async def episode(script: Script) -> None:
        async with places:
            before = sampled = script.opening
            for turn, length in enumerate(script.lengths):
                before = script.prompt(turn, before, sampled)
                request = SampleRequest(
                    prompt_ids=before,
                    params=SamplingParams(max_tokens=length),
                    seed=script.seed + 10**6 * turn,
                    session=str(script.seed),
                )
                completion = await sampler.generate(request)
                assert completion.logprobs is not None and len(completion.logprobs) == length
                sampled = completion.ids

    await asyncio.gather(*(episode(script) for script in scripts))


# ---- transformers, padded


@dataclass
class Row:
    """One episode in flight, in a padded batch."""

    script: Script
    turn: int = 0
    prompt: Ids | None = None
    cached: int = 0
    """Number of prompt tokens whose keys and values are in the cache of the batch."""


class PaddedBatch:
    """Plays by calling `generate` for the next turn of all episodes in flight together."""

    def __init__(self, model: Any, *, keep_cache: bool) -> None:
        self.model = model
        self.keep_cache = keep_cache

    async def __call__(self, scripts: Sequence[Script], concurrency: int) -> None:
        """Play all episodes."""
        waiting = [Row(script, prompt=script.opening) for script in reversed(scripts)]
        rows = [waiting.pop() for _ in range(min(concurrency, len(waiting)))]
        cache: DynamicCache | None = None
        while rows:
            sampled, cache = self._turn(rows, cache)
            kept = [i for i, row in enumerate(rows) if row.turn + 1 < len(row.script.lengths)]
            for i in kept:
                row = rows[i]
                row.turn += 1
                row.cached = len(row.prompt) + len(sampled[i]) - 1 if self.keep_cache else 0
                row.prompt = row.script.prompt(row.turn, row.prompt, sampled[i])
            if cache is not None:
                cache.batch_select_indices(torch.tensor(kept, dtype=torch.int64))
            rows = [rows[i] for i in kept]
            arrived = [waiting.pop() for _ in range(min(concurrency - len(rows), len(waiting)))]
            if cache is not None and arrived:
                for layer in cache.layers:
                    layer.keys, layer.values = (
                        torch.cat([t, t.new_zeros(len(arrived), *t.shape[1:])]) for t in (layer.keys, layer.values)
                    )
            rows += arrived

    def _turn(self, rows: list[Row], cache: DynamicCache | None) -> tuple[list[Ids], DynamicCache | None]:
        """Call `generate` once. Returns the sampled ids of each row, and the cache, in which the real tokens of every
        row are at the right end."""
        past = max(row.cached for row in rows)
        new = max(len(row.prompt) - row.cached for row in rows)
        ids = np.zeros((len(rows), past + new), dtype=np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            for part, end in ((row.prompt[: row.cached], past), (row.prompt[row.cached :], past + new)):
                ids[i, end - len(part) : end], mask[i, end - len(part) : end] = part, 1
        lengths = [row.script.lengths[row.turn] for row in rows]
        out = self.model.generate(
            torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=max(lengths),
            max_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            use_cache=True,
            past_key_values=cache if past else None,
        )
        tokens = out.sequences[:, past + new :]
        # Computing logits - logsumexp only at the sampled token avoids a second array of the vocabulary's size.
        logprobs = torch.stack(
            [
                logits.gather(-1, tokens[:, t : t + 1])[:, 0] - logits.logsumexp(-1)
                for t, logits in enumerate(out.logits)
            ]
        )
        assert logprobs.shape == (max(lengths), len(rows))
        sampled = [tokens[i, :n].numpy().astype(np.int32) for i, n in enumerate(lengths)]
        if not self.keep_cache:
            return sampled, None
        real = np.zeros((len(rows), past + new + max(lengths) - 1), dtype=bool)
        real[:, : past + new] = mask
        for i, n in enumerate(lengths):
            real[i, past + new : past + new + n - 1] = True
        return sampled, _packed(out.past_key_values, real)


def _packed(cache: DynamicCache, real: np.ndarray[Any, np.dtype[np.bool_]]) -> DynamicCache:
    """Move the columns of real tokens in every row to the right end, in order, and cut the cache to the columns that
    are needed."""
    order = np.argsort(real, axis=1, kind="stable")[:, -int(real.sum(1).max()) :]
    take = torch.from_numpy(order)[:, None, :, None]
    for layer in cache.layers:
        index = take.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
    return cache


# ---- transformers, continuous


async def play_continuous(model: Any, scripts: Sequence[Script], concurrency: int) -> None:
    """Play with one request per turn. An episode's next request is sent as soon as the result of the previous one has
    arrived."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=128
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=64 * concurrency,
            max_batch_tokens=1024,
            max_requests_per_batch=concurrency,
            return_logprobs=True,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
        ),
    )
    waiting = [Row(script, prompt=script.opening) for script in reversed(scripts)]
    running: dict[str, Row] = {}

    def send(row: Row) -> None:
        name = f"{row.script.seed}-{row.turn}"
        running[name] = row
        manager.add_request(row.prompt.tolist(), request_id=name, max_new_tokens=row.script.lengths[row.turn])

    manager.start()
    try:
        for _ in range(min(concurrency, len(waiting))):
            send(waiting.pop())
        while running:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("no result within 60 seconds")
            if result.error is not None:
                raise RuntimeError(result.error)
            row = running.pop(result.request_id)
            sampled = np.array(result.generated_tokens, dtype=np.int32)
            if not len(sampled) == len(result.logprobs) == row.script.lengths[row.turn]:
                raise RuntimeError(
                    f"{len(sampled)} tokens and {len(result.logprobs)} logprobs, asked for "
                    f"{row.script.lengths[row.turn]}"
                )
            row.turn += 1
            if row.turn < len(row.script.lengths):
                row.prompt = row.script.prompt(row.turn, row.prompt, sampled)
                send(row)
            elif waiting:
                send(waiting.pop())
    finally:
        manager.stop(block=True)


# ---- the measurement


def processor_name() -> str:
    """The name of the processor according to the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in pairs}
    name = named.get("model name", platform.machine())
    return f"{name}, family {named.get('cpu family')}, model {named.get('model')}"


def demo_model(folder: Path) -> Path:
    """Make the demo's model with random weights; returns its folder."""
    build = load_config(RECIPE).model.build
    assert build is not None
    shown = GuessNumber().demonstrations(400, 0)
    build_model(folder / "model", build, [chat_text(d.messages, d.tools) for d in shown], seed=0)
    return folder / "model"


async def measure(model: Path, args: argparse.Namespace) -> tuple[Mapping[str, list[float]], Mapping[str, str], int]:
    """Return (1) the tokens per second of each engine in each repetition, (2) the reasons why some engines cannot run,
    and (3) the size of the vocabulary."""

    def ours(**settings: Any) -> TorchSampler:
        config = TorchSettings(max_batch_size=args.concurrency, device="cpu", **settings)
        return TorchSampler(model, config=config, context_length=CONTEXT, num_threads=args.threads)

    theirs = AutoModelForCausalLM.from_pretrained(model).eval()
    samplers = {"verbatim": ours()}
    if args.bfloat16:
        samplers["verbatim_bfloat16"] = ours(dtype="bfloat16")
    if not args.short:
        samplers["verbatim_deterministic"] = ours(deterministic=True)
    engines: dict[str, Callable[[Sequence[Script], int], Awaitable[None]]] = {
        name: lambda scripts, n, sampler=sampler: play_ours(sampler, scripts, n)  # type: ignore[misc]
        for name, sampler in samplers.items()
    }
    engines["padded_cached"] = PaddedBatch(theirs, keep_cache=True)
    if not args.short:
        engines["padded"] = PaddedBatch(theirs, keep_cache=False)
        engines["continuous"] = lambda scripts, n: play_continuous(theirs, scripts, n)
    vocab_size = samplers["verbatim"].vocab_size
    failures: dict[str, str] = {}
    for name in list(engines):
        try:
            await engines[name](write_scripts(8, vocab_size, 999), args.concurrency)  # warms up
        except Exception as error:
            if name in samplers:
                raise
            failures[name] = f"{type(error).__name__}: {error}"[:300]
            del engines[name]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(args.repeats):
        scripts = write_scripts(args.episodes, vocab_size, repeat)
        tokens = sum(itertools.chain.from_iterable(script.lengths for script in scripts))
        for name, play in engines.items():
            began = time.perf_counter()
            await play(scripts, args.concurrency)
            rates[name].append(tokens / (time.perf_counter() - began))
    for sampler in samplers.values():
        await sampler.close()
    return rates, failures, vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--model")
    args = parser.parse_args()
    args.episodes = args.episodes or (64 if args.short else 128)
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = Path(folder_of(args.model)) if args.model else demo_model(Path(folder))
        rates, failures, vocab_size = asyncio.run(measure(model, args))

    def ratio(over: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates["verbatim"], rates[over], strict=True)), 3)

    opponents = [name for name in rates if not name.startswith("verbatim")]
    best = max(opponents, key=lambda name: statistics.median(rates[name]))
    print(
        json.dumps(
            {
                "benchmark": "engine",
                "tokens_per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
                "failed": failures,
                "best_opponent": best,
                "ratio_over_best_opponent": ratio(best),
                "ratio_over": {name: ratio(name) for name in opponents},
                "deterministic_cost_ratio": None if args.short else ratio("verbatim_deterministic"),
                "bfloat16_over_float32": round(1 / ratio("verbatim_bfloat16"), 3) if args.bfloat16 else None,
                "model": args.model or "the demo's",
                "processor": processor_name(),
                "threads": args.threads,
                "cores": len(os.sched_getaffinity(0)),
                "concurrency": args.concurrency,
                "episodes": args.episodes,
                "vocab_size": vocab_size,
                "repeats": args.repeats,
            }
        )
    )


if __name__ == "__main__":
    main()
