"""Compares passes of the embedded sampler with its compiled kernel and with PyTorch, on the load of a small agent's
run.

Both engines compute the same sequences in one process, in turns. Times are processor time of one thread, without an
event loop. The kinds of passes are:

- `decode`: one token for each of 128 sequences, in 8 groups of 16. Each has a prompt of 300 tokens, of which 200 are
  the same in all groups, followed by 10 to 90 tokens of its own.
- `prompts`: the same, but in each pass, 24 of the sequences get a tool's answer of 40 tokens.
- `few`: one token for 1 sequence, and for each of 4 sequences.
- `new_weights`: all passes after a weight update until all 128 sequences decode again.
- `episodes`: whole episodes, starting from empty caches, with 4 turns of 14 to 30 sampled tokens and answers of 24 to
  40 tokens.

With `--model` (a folder, or a name for `verbatim models get`), the engines compute that model instead. The kinds are
then passes of 1, 16 and 64 sequences, and of 64 sequences of which 8 get a tool's answer. The engine `bfloat16` is the
compiled kernel with that dtype.

Prints one JSON line; milliseconds and ratios are medians over the repetitions. Run: python benchmarks/engine_passes.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import processor_name
from verbatim.config.schema import BuildConfig
from verbatim.environments.guess_number import GuessNumber
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.build import build_model
from verbatim.models.catalog import folder_of
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.models.trained_tokenizer import chat_text

CONTEXT = 1024
GROUPS, SIZE = 8, 16
ENGINES = {"torch": {"kernel": "torch"}, "compiled": {"kernel": "compiled"}}
LARGE_ENGINES = {**ENGINES, "bfloat16": {"kernel": "compiled", "dtype": "bfloat16"}}
KINDS = (("decode_128", 128, 0), ("prompts_24_of_128", 128, 24), ("few_1", 1, 0), ("few_4", 4, 0))
LARGE_KINDS = (("decode_1", 1, 0), ("decode_16", 16, 0), ("decode_64", 64, 0), ("prompts_8_of_64", 64, 8))
"""The kinds of passes: name, number of sequences, and number of sequences that get a tool's answer."""
Ids = np.ndarray[Any, np.dtype[np.int32]]


def text(rng: np.random.Generator, low: int, high: int, vocab: int) -> Ids:
    """Draw random ids; their number is between `low` and `high`."""
    return rng.integers(0, vocab, rng.integers(low, high + 1)).astype(np.int32)


def openings(rng: np.random.Generator, vocab: int) -> list[Ids]:
    """Draw the prompts of all sequences of all groups."""
    schema = text(rng, 200, 200, vocab)
    each = [np.concatenate([schema, text(rng, 100, 100, vocab)]) for _ in range(GROUPS)]
    return [prompt for prompt in each for _ in range(SIZE)]


def started(decoder: Decoder, requests: list[SampleRequest]) -> list[int]:
    """Add the requests to the decoder, and run it until all sequences decode; returns their slots."""
    waiting, slots = list(requests), []
    table = decoder.table
    while waiting or (table.length[slots] - table.computed[slots] > 1).any():
        while waiting and (slot := decoder.add(waiting[0])) is not None:
            slots.append(slot)
            waiting.pop(0)
        decoder.step()
    return slots


def times_of_passes(decoder: Decoder, rows: int, answers: int, passes: int, seed: int) -> list[float]:
    """The seconds of each pass over `rows` sequences. In each pass, `answers` of the sequences get a tool's answer."""
    rng = np.random.default_rng(seed)
    vocab, table = decoder.model.vocab_size, decoder.table
    prompts = openings(rng, vocab)[:rows]
    whole = [np.concatenate([p, text(rng, 10, 90, vocab)]) for p in prompts]
    params = SamplingParams(max_tokens=CONTEXT)
    slots = started(decoder, [SampleRequest(prompt_ids=ids, params=params, seed=i) for i, ids in enumerate(whole)])
    seconds = []
    for number in range(passes):
        for slot in np.roll(slots, -number * answers)[:answers].tolist():
            answer, length = text(rng, 40, 40, vocab), int(table.length[slot])
            table.ids[slot, length : length + 40] = answer
            table.length[slot] = length + 40
        began = time.thread_time()
        decoder.step()
        seconds.append(time.thread_time() - began)
    for slot in slots:
        decoder.drop(slot)
    return seconds


def seconds_of_rebuild(decoder: Decoder, seed: int) -> float:
    """The seconds of the passes that compute 128 sequences again from their ids after a weight update."""
    rng = np.random.default_rng(seed)
    vocab, table = decoder.model.vocab_size, decoder.table
    whole = [np.concatenate([prompt, text(rng, 10, 90, vocab)]) for prompt in openings(rng, vocab)]
    params = SamplingParams(max_tokens=CONTEXT)
    slots = started(decoder, [SampleRequest(prompt_ids=ids, params=params, seed=i) for i, ids in enumerate(whole)])
    decoder.set_version(decoder.version + 1)
    began = time.thread_time()
    while (table.length[slots] - table.computed[slots] > 1).any():
        decoder.step()
    seconds = time.thread_time() - began
    for slot in slots:
        decoder.drop(slot)
    return seconds


def tokens_per_second(decoder: Decoder, seed: int) -> float:
    """The sampled tokens per second of processor time over whole episodes. Each turn is a request that extends the
    previous turn."""
    rng = np.random.default_rng(seed)
    vocab, table = decoder.model.vocab_size, decoder.table
    plans = [[(int(rng.integers(14, 31)), text(rng, 24, 40, vocab)) for _ in range(4)] for _ in range(GROUPS * SIZE)]
    waiting = [(index, 0, ids) for index, ids in enumerate(openings(rng, vocab))]
    running: dict[int, tuple[int, int]] = {}
    decoder.set_version(decoder.version + 1)
    before, began = decoder.counts.sampled_tokens, time.thread_time()
    while waiting or running:
        for entry in list(waiting):
            index, turn, ids = entry
            slot = decoder.add(
                SampleRequest(
                    prompt_ids=ids,
                    params=SamplingParams(max_tokens=plans[index][turn][0]),
                    seed=10 * index + turn,
                    session=str(index),
                )
            )
            if slot is not None:
                running[slot] = (index, turn)
                waiting.remove(entry)
        for slot in decoder.step()[0].tolist():
            index, turn = running.pop(slot)
            decoder.release(slot)
            if turn < 3:
                ids = np.concatenate([table.ids[slot, : table.length[slot]], plans[index][turn][1]])
                waiting.append((index, turn + 1, ids))
    return (decoder.counts.sampled_tokens - before) / (time.thread_time() - began)


def small_model(folder: Path) -> Path:
    """Make a model of 0.9M parameters with random weights; returns its folder."""
    shown = GuessNumber().demonstrations(400, 0)
    build = BuildConfig(hidden_size=128, num_layers=4, vocab_size=1024)
    build_model(folder / "model", build, [chat_text(d.messages, d.tools) for d in shown], seed=0)
    return folder / "model"


def make(folder: Path | str, engines: Mapping[str, Mapping[str, str]], num_slots: int) -> dict[str, Decoder]:
    """Make decoders of one model, one for each engine's settings."""
    made = {}
    for name, how in engines.items():
        settings = TorchSettings(max_batch_size=num_slots, device="cpu", **how)
        model = CausalLM(load_model(folder, dtype=settings.dtype, device="cpu").requires_grad_(False))
        made[name] = Decoder(model, settings, context_length=CONTEXT, version=0)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = folder_of(args.model) if args.model else small_model(Path(folder))
        decoders = make(model, LARGE_ENGINES if args.model else ENGINES, 64 if args.model else GROUPS * SIZE)
    kinds: dict[str, Callable[[Decoder, int], float]] = {
        name: lambda decoder, seed, rows=rows, answers=answers: (
            1e3
            * statistics.median(  # type: ignore[misc]
                times_of_passes(decoder, rows, answers, 6 if args.model else 12, seed)
            )
        )
        for name, rows, answers in (LARGE_KINDS if args.model else KINDS)
    }
    if not args.model:
        kinds["new_weights"] = lambda decoder, seed: 1e3 * seconds_of_rebuild(decoder, seed)
        kinds["episodes_tokens_per_second"] = tokens_per_second
    found: dict[str, dict[str, list[float]]] = {name: {kernel: [] for kernel in decoders} for name in kinds}
    for seed in range(args.repeats + 1):
        for name, kind in kinds.items():
            for kernel, decoder in decoders.items():
                value = kind(decoder, seed)
                if seed:  # the first round warms up
                    found[name][kernel].append(value)
    measured = {
        name: {kernel: round(statistics.median(values), 3) for kernel, values in by.items()}
        for name, by in found.items()
    }
    ratios = {
        engine: {
            name: round(
                statistics.median(
                    a / b
                    for a, b in zip(
                        *((by[engine], by["torch"]) if name.endswith("second") else (by["torch"], by[engine])),
                        strict=True,
                    )
                ),
                2,
            )
            for name, by in found.items()
        }
        for engine in decoders
        if engine != "torch"
    }
    parameters = sum(p.numel() for p in decoders["torch"].model.model.parameters())
    print(
        json.dumps(
            {
                "benchmark": "engine_passes",
                "processor": processor_name(),
                "parameters": parameters,
                "milliseconds_or_tokens_per_second": measured,
                "over_torch": ratios,
                "repeats": args.repeats,
            }
        )
    )


if __name__ == "__main__":
    main()
