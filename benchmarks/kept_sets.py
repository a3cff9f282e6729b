"""Measures what exact training with top_p 0.95 and top_k 50 costs: in a training step, in sampling, and in bytes.

- `train step`: an optimizer step that normalises over the kept sets, compared with a step that normalises over the
  whole vocabulary (as with `accept_truncation_mismatch`). Both train the same completions, which are drawn from the
  truncated distribution.
- `sample 16`, `sample 64`: tokens per second for 16 and 64 sequences, drawn from the truncated distribution with their
  kept sets, compared with tokens drawn from the whole distribution.
- `bytes a token`: the size of the kept sets per token, in the batch for the trainer and in a file of trajectories.

In each round, one pair of measurements is made for each of the three kinds, one measurement after the other, in
alternating order. Rounds continue until there are enough pairs or the time is used up. A ratio is the median over the
pairs, of seconds for the training step and of tokens per second for sampling. Its interval contains the true median
with a probability of at least 95%, and is computed from the order statistics of the pairs.

Prints one table. Run: python benchmarks/kept_sets.py --model smollm2-135m
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from engine_passes import started
from train_step import sample_of
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.types import Int32, KeptSets, TrainingSample
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.catalog import folder_of
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_tokenizer
from verbatim.trainer.trainer import Trainer

CONTEXT, MOST_SEQUENCES = 512, 64
UNCUT = SamplingParams(max_tokens=CONTEXT)
CUT = SamplingParams(max_tokens=CONTEXT, top_p=0.95, top_k=50, return_kept_sets=True)
QUESTIONS = (
    "Why is the sky blue in the daytime and red in the evening?",
    "Write a short letter to a neighbour whose dog barks at night.",
    "Explain in plain words what a hash table is and when to use one.",
    "A train leaves at 9:40 and takes 135 minutes. When does it arrive?",
    "Name three rivers in Africa and say where each of them ends.",
    "What should I cook tonight with rice, onions and two eggs?",
    "Tell a story of four sentences about a lighthouse keeper.",
    "List the steps to change the tyre of a bicycle.",
)


@dataclass
class Kind:
    """A pair of functions that measure the same thing with and without kept sets."""

    ours: Callable[[], float]
    """Measures with kept sets; `theirs` measures without."""
    theirs: Callable[[], float]
    pairs: list[tuple[float, float]] = field(default_factory=list)

    def measure(self) -> None:
        """Measure one more pair."""
        if len(self.pairs) % 2:
            theirs = self.theirs()
            self.pairs.append((self.ours(), theirs))
        else:
            self.pairs.append((self.ours(), self.theirs()))

    def line(self, digits: int) -> str:
        """A line of the table: both medians, and the median of the ratios with its interval."""
        ours, theirs = (statistics.median(one) for one in zip(*self.pairs, strict=True))
        ratios = sorted(one / other for one, other in self.pairs)
        count, below, out = len(ratios), 0.0, 0
        while (below := below + math.comb(count, out) / 2**count) <= 0.025:
            out += 1
        low, high = (ratios[out - 1], ratios[-out]) if out else (math.nan, math.nan)
        return (
            f"{ours:10.{digits}f} {theirs:10.{digits}f} {statistics.median(ratios):8.3f} "
            f"({low:.3f} to {high:.3f}) {count:5}"
        )


def drawn(
    decoder: Decoder, prompts: Sequence[Int32], params: SamplingParams, passes: int
) -> tuple[float, list[tuple[Int32, np.ndarray, KeptSets | None]]]:
    """Run this number of passes, each of which samples one token for every sequence. Returns (1) tokens per second, and
    (2) for each sequence its ids (prompt and completion), logprobs and kept sets."""
    slots = started(decoder, [SampleRequest(prompt_ids=ids, params=params, seed=i) for i, ids in enumerate(prompts)])
    table = decoder.table
    before, began = decoder.counts.sampled_tokens, time.perf_counter()
    for _ in range(passes):
        decoder.step()
    kept = [table.kept_sets(slot) for slot in slots]
    rate = (decoder.counts.sampled_tokens - before) / (time.perf_counter() - began)
    found = []
    for slot, sets in zip(slots, kept, strict=True):
        start, end = int(table.prompt_length[slot]), int(table.length[slot])
        found.append((table.ids[slot, :end].copy(), table.logprobs[slot, start:end].copy(), sets))
        decoder.release(slot)
    return rate, found


def as_samples(found: Sequence[tuple[Int32, np.ndarray, KeptSets | None]]) -> list[TrainingSample]:
    """Make training samples of completions with kept sets. Half of the advantages are positive, half are negative."""
    samples = []
    for number, (ids, logprobs, kept) in enumerate(found):
        assert kept is not None
        mask = np.arange(len(ids)) >= len(ids) - len(logprobs)
        whole = np.full(len(ids), np.nan, np.float32)
        whole[mask] = logprobs
        sample = sample_of(ids, mask, np.where(mask, 0, -1).astype(np.int32), str(number))
        advantages = np.where(mask, 0.5 if number % 2 else -0.5, 0).astype(np.float32)
        spread = kept.spread(np.flatnonzero(mask), len(ids))
        samples.append(replace(sample, logprobs=whole, advantages=advantages, kept_sets=spread))
    return samples


def bytes_a_token(kept: Sequence[KeptSets]) -> tuple[float, float, float]:
    """Return three means per token: the number of ids in a kept set, its bytes in memory, and its bytes in a Parquet
    file that is written like the files of trajectories."""
    tokens = sum(map(len, kept))
    sets = pa.array([[each[place].tolist() for place in range(len(each))] for each in kept])
    table = pa.table({"kept_sets": sets.cast(pa.list_(pa.list_(pa.int32())))})
    sink, leaf = pa.BufferOutputStream(), "kept_sets.list.element.list.element"
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, column_encoding={leaf: "DELTA_BINARY_PACKED"})
    stored = pq.ParquetFile(sink.getvalue()).metadata.row_group(0).column(0).total_compressed_size
    held = sum(each.ids.nbytes + each.offsets.nbytes for each in kept)
    return sum(len(each.ids) for each in kept) / tokens, held / tokens, stored / tokens


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or a name of `verbatim models get`")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=300, help="no round of pairs begins after these")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kernel", default="auto", help="of the sampler: auto, torch or compiled")
    parser.add_argument("--completions", type=int, default=8, help="trained in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = Path(folder_of(args.model))
    tokenizer = load_tokenizer(folder)
    asked = [np.array(tokenizer.encode(text + "\n"), np.int32) for text in QUESTIONS]
    prompts = [asked[number % len(asked)] for number in range(MOST_SEQUENCES)]

    settings = TorchSettings(max_batch_size=MOST_SEQUENCES, device="cpu", kernel=args.kernel)
    model = CausalLM(load_model(folder, dtype=settings.dtype, device="cpu").requires_grad_(False))
    decoder = Decoder(model, settings, context_length=CONTEXT, version=0)
    _, found = drawn(decoder, prompts[: args.completions], CUT, args.length)
    exact = as_samples(found)
    whole = [replace(sample, kept_sets=None) for sample in exact]
    trainer = Trainer(
        folder,
        TrainerConfig(optim=OptimConfig(lr=1e-6), device="cpu", packing="rows"),
        loss=LOSSES["default"],
        total_optimizer_steps=10_000,
    )

    def step(samples: list[TrainingSample]) -> float:
        began = time.perf_counter()
        trainer.train_batch(samples)
        return time.perf_counter() - began

    def sampling(count: int) -> Kind:
        passes = 12 if count < MOST_SEQUENCES else 6
        return Kind(
            lambda: drawn(decoder, prompts[:count], CUT, passes)[0],
            lambda: drawn(decoder, prompts[:count], UNCUT, passes)[0],
        )

    kinds = {
        "train step, s": Kind(lambda: step(exact), lambda: step(whole)),
        "sample 16, tokens/s": sampling(16),
        "sample 64, tokens/s": sampling(MOST_SEQUENCES),
    }
    for kind in kinds.values():
        kind.measure()  # warms up
        kind.pairs.clear()
    for number in range(args.pairs):
        if number and time.perf_counter() > deadline:
            break
        for kind in kinds.values():
            kind.measure()

    num_tokens, trained = sum(map(len, exact)), sum(sample.num_trained_tokens for sample in exact)
    ids, held, stored = bytes_a_token([kept for *_, kept in found if kept is not None])
    print(
        f"{folder.name}, top_p {CUT.top_p}, top_k {CUT.top_k}, {torch.get_num_threads()} threads, {args.kernel} kernel"
    )
    print(f"{'':20} {'kept sets':>10} {'without':>10} {'ratio':>8} (95%)            pairs")
    for name, kind in kinds.items():
        print(f"{name:20} {kind.line(2 if name.startswith('train') else 0)}")
    print(f"step of {num_tokens} tokens, {trained} trained; ids of a kept set {ids:.1f}")
    print(f"bytes a token: {held:.0f} in the batch, {stored:.0f} in the file")


if __name__ == "__main__":
    main()
