"""The embedded sampler's passes by its compiled kernel against those by PyTorch, on the load of a small agent's run.

Both play the same sequences in one process, in turns; times are processor time of one thread, without an event loop.

- `decode`: a token for each of 128 sequences: 8 groups of 16, prompts of 300 tokens (200 the same in all groups), and
  10 to 90 tokens of their own.
- `prompts`: the same, with tool answers of 40 tokens for 24 of them in each pass.
- `few`: a token for 1 sequence, for 4.
- `episodes`: whole episodes of 4 turns of 14 to 30 sampled tokens with answers of 24 to 40, from empty caches.

Prints one JSON line; milliseconds and ratios are medians over the repetitions. Run: python benchmarks/engine_passes.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
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
from verbatim.models.build import build_model, chat_text
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model

CONTEXT = 1024
GROUPS, SIZE = 8, 16
Ids = np.ndarray[Any, np.dtype[np.int32]]


def text(rng: np.random.Generator, low: int, high: int, vocab: int) -> Ids:
    """Random ids."""
    return rng.integers(0, vocab, rng.integers(low, high + 1)).astype(np.int32)


def openings(rng: np.random.Generator, vocab: int) -> list[Ids]:
    """The prompts of all groups' sequences."""
    schema = text(rng, 200, 200, vocab)
    each = [np.concatenate([schema, text(rng, 100, 100, vocab)]) for _ in range(GROUPS)]
    return [prompt for prompt in each for _ in range(SIZE)]


def started(decoder: Decoder, requests: list[SampleRequest]) -> list[int]:
    """The slots of sequences that all decode."""
    waiting, slots = list(requests), []
    table = decoder.table
    while waiting or (table.length[slots] - table.computed[slots] > 1).any():
        while waiting and (slot := decoder.add(waiting[0])) is not None:
            slots.append(slot)
            waiting.pop(0)
        decoder.step()
    return slots


def times_of_passes(decoder: Decoder, rows: int, answers: int, passes: int, seed: int) -> list[float]:
    """Seconds of passes of so many sequences; in each, some of them get the answer of a tool."""
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


def tokens_per_second(decoder: Decoder, seed: int) -> float:
    """Sampled tokens per second of processor time over whole episodes; each turn is a request that extends the last."""
    rng = np.random.default_rng(seed)
    vocab, table = decoder.model.vocab_size, decoder.table
    plans = [
        [(int(rng.integers(14, 31)), text(rng, 24, 40, vocab)) for _ in range(4)] for _ in range(GROUPS * SIZE)
    ]
    waiting = [(index, 0, ids) for index, ids in enumerate(openings(rng, vocab))]
    running: dict[int, tuple[int, int]] = {}
    decoder.set_version(decoder.version + 1)
    before, began = decoder.counts.sampled_tokens, time.thread_time()
    while waiting or running:
        for entry in list(waiting):
            index, turn, ids = entry
            slot = decoder.add(SampleRequest(prompt_ids=ids, params=SamplingParams(max_tokens=plans[index][turn][0]),
                                             seed=10 * index + turn, session=str(index)))  # fmt: skip
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


def make(folder: Path) -> dict[str, Decoder]:
    """An engine for each kernel, of a model of 0.9M parameters."""
    shown = GuessNumber().demonstrations(400, 0)
    build = BuildConfig(hidden_size=128, num_layers=4, vocab_size=1024)
    build_model(folder / "model", build, [chat_text(d.messages, d.tools) for d in shown], seed=0)
    made = {}
    for kernel in ("torch", "compiled"):
        settings = TorchSettings(max_batch_size=GROUPS * SIZE, kernel=kernel, device="cpu")
        model = CausalLM(load_model(folder / "model", device="cpu").requires_grad_(False))
        made[kernel] = Decoder(model, settings, context_length=CONTEXT, version=0)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        decoders = make(Path(folder))
    kinds: dict[str, Callable[[Decoder, int], float]] = {
        name: lambda decoder, seed, rows=rows, answers=answers: 1e3 * statistics.median(  # type: ignore[misc]
            times_of_passes(decoder, rows, answers, 12, seed))
        for name, rows, answers in (("decode_128", 128, 0), ("prompts_24_of_128", 128, 24), ("few_1", 1, 0),
                                    ("few_4", 4, 0))
    }  # fmt: skip
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
        name: round(statistics.median(a / b for a, b in zip(*(
            (by["compiled"], by["torch"]) if name.endswith("second") else (by["torch"], by["compiled"])
        ), strict=True)), 2)
        for name, by in found.items()
    }  # fmt: skip
    parameters = sum(p.numel() for p in decoders["torch"].model.model.parameters())
    print(json.dumps({"benchmark": "engine_passes", "processor": processor_name(), "parameters": parameters,
                      "milliseconds_or_tokens_per_second": measured, "compiled_over_torch": ratios,
                      "repeats": args.repeats}))  # fmt: skip


if __name__ == "__main__":
    main()
