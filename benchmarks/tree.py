"""One optimizer step on samples that share prefixes, packed as rows and as a tree: what of the ideal is reached.

Groups of 16-turn episodes whose thinking is stripped at every user turn, one sample per turn (its full prompt and its
completion). All episodes of a group open alike: system prompt and first user message. The ideal is the number of the
samples' tokens over the number of distinct (prefix, token) pairs; the speed-up counts everything in a step, so also
what a tree does not share: targets, their vocabulary, the optimizer. Steps of both are taken in turns, on one thread,
and timed by the processor's clock, which stands still while others have it; ratios are of medians. A load without
anything shared shows what the tree packer costs where there is nothing to gain. Peak memory is the resident memory of a
child process at its highest during a step, above what it held after a small step: activations that are saved, masks,
gradients of activations.

Prints one JSON line. Run: OMP_NUM_THREADS=1 python benchmarks/tree.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from train_step import OPTIM, resident_bytes
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.core.types import TrainingSample
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.packing import pack_tree, unique_tokens
from verbatim.trainer.trainer import Trainer

TURNS, SYSTEM, USER, ANSWER = 16, 256, 128, 32
"""Of an episode, and tokens of its parts."""
VOCAB = 4096
THINK = VOCAB - 1
"""What a completion opens with, and no message does."""
BUDGETS = (4096, 8192, 16_384)
"""Micro-batches whose cuts are counted."""
PACKINGS = ("rows", "tree")


def model_folder(folder: Path) -> Path:
    """Width 256, 4 layers, 4 query heads over 2 key/value heads."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# ---- loads


def sample(ids: np.ndarray, start: int, trajectory_id: str, turn: int) -> TrainingSample:
    """These tokens, trained from `start` on; sampled by a policy to which all tokens were alike."""
    mask = np.arange(len(ids)) >= start
    return TrainingSample(
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(VOCAB), np.nan).astype(np.float32),
        advantages=np.where(mask, 0.5, 0).astype(np.float32),
        chunk_ids=np.where(mask, turn, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(len(ids), np.float32),
        trajectory_id=trajectory_id,
    )


def group(num_episodes: int, thinking: int) -> list[TrainingSample]:
    """One sample per turn: the history without thinking, then this turn's thinking and answer."""
    rng = np.random.default_rng(0)

    def text(length: int) -> np.ndarray:
        return rng.integers(0, THINK, length)

    opening = text(SYSTEM + USER)
    samples = []
    for episode in range(num_episodes):
        prompt = opening
        for turn in range(TURNS):
            answer = text(ANSWER)
            completion = np.concatenate([[THINK], text(thinking - 1), answer])
            samples.append(sample(np.concatenate([prompt, completion]), len(prompt), str(episode), turn))
            prompt = np.concatenate([prompt, answer, text(USER)])
    return samples


def unshared() -> list[TrainingSample]:
    """Sixteen samples of 200 to 1,700 tokens, each with words of its own; the last third is trained."""
    rng = np.random.default_rng(1)
    return [
        sample(np.append(i, rng.integers(0, THINK, n)), 2 * n // 3, str(i), 0)
        for i, n in enumerate(range(200, 1800, 100))
    ]


# ---- measuring


def make_trainer(folder: Path, packing: str, budget: int | None) -> Trainer:
    config = TrainerConfig(optim=OPTIM, device="cpu", packing=packing, micro_batch_tokens=budget)  # type: ignore[arg-type]
    return Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=10_000)


def compare(folder: Path, samples: list[TrainingSample], args: argparse.Namespace) -> dict[str, Any]:
    """Steps of rows and tree in turns."""
    trainers = {packing: make_trainer(folder, packing, args.micro_batch_tokens) for packing in PACKINGS}
    found: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
    metrics: dict[str, dict[str, float]] = {}
    for trainer in trainers.values():
        trainer.train_batch([s for s in samples if s.trajectory_id == "0"])  # warms up
    for _ in range(args.repeats):
        for packing in PACKINGS:
            began = time.process_time()
            metrics[packing] = trainers[packing].train_batch(samples)
            found[packing].append(time.process_time() - began)
    medians = {packing: statistics.median(times) for packing, times in found.items()}
    speed_up, ideal = medians["rows"] / medians["tree"], sum(map(len, samples)) / unique_tokens(samples)
    return {
        "speed_up": round(speed_up, 3),
        "ideal": round(ideal, 3),
        "reached": round(speed_up / ideal, 3),
        "seconds": {packing: round(median, 3) for packing, median in medians.items()},
        "computed_tokens": {packing: int(metrics[packing]["num_tokens"]) for packing in PACKINGS},
        "repeated_tokens": int(metrics["tree"]["packing/repeated_tokens"]),
        "repeated_tokens_by_budget": {
            budget: sum(m.num_repeated_tokens for m in pack_tree(samples, micro_batch_tokens=budget, keep_whole=False))
            for budget in BUDGETS
        },
        "attention": {packing: attention(t, samples) for packing, t in trainers.items()},
        "samples": len(samples),
        "trained_tokens": sum(s.num_trained_tokens for s in samples),
    }


def attention(trainer: Trainer, samples: list[TrainingSample]) -> str:
    """The plans that a step attends by."""
    plans = (DeviceBatch(micro_batch, trainer.device).plan for micro_batch in trainer.packer.pack(samples))
    return ", ".join(sorted({type(plan).__name__ for plan in plans}))


def print_peak_memory(args: argparse.Namespace) -> None:
    """In a process of its own: how far a step raises its resident memory."""
    trainer = make_trainer(Path(args.model), args.peak_memory, args.micro_batch_tokens)
    samples = group(args.episodes, 64)
    trainer.train_batch(samples[:2])  # libraries load, the optimizer gets its state
    before = resident_bytes("VmRSS")
    trainer.train_batch(samples)
    print(resident_bytes("VmHWM") - before)


def memory(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both packings at the same most tokens of a micro-batch."""
    peaks = {}
    for packing in PACKINGS:
        command = [
            sys.executable,
            __file__,
            "--peak-memory",
            packing,
            "--model",
            str(folder),
            "--episodes",
            str(args.episodes),
        ]
        if args.micro_batch_tokens:
            command += ["--micro-batch-tokens", str(args.micro_batch_tokens)]
        peaks[packing] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"ratio": round(peaks["tree"] / peaks["rows"], 3), "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=2, help="in a group")
    parser.add_argument("--micro-batch-tokens", type=int, default=None, help="by default the trainer's")
    parser.add_argument("--cases", nargs="*", default=["thinking_64", "thinking_256", "unshared", "memory"])
    parser.add_argument("--peak-memory", choices=PACKINGS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak_memory:
        return print_peak_memory(args)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name) / "model")
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            "thinking_64": lambda: compare(folder, group(args.episodes, 64), args),
            "thinking_256": lambda: compare(folder, group(args.episodes, 256), args),
            "unshared": lambda: compare(folder, unshared(), args),
            "memory": lambda: memory(folder, args),
        }
        found = {name: cases[name]() for name in args.cases}
    print(
        json.dumps(
            {
                "benchmark": "tree",
                **found,
                "episodes": args.episodes,
                "micro_batch_tokens": args.micro_batch_tokens or "default",
                "repeats": args.repeats,
                "threads": 1,
                "cores": len(os.sched_getaffinity(0)),
            }
        )
    )


if __name__ == "__main__":
    main()
