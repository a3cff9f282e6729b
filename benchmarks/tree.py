"""Measures an optimizer step on samples that share prefixes, packed as rows and as a tree, and how much of the ideal
speed-up is reached.

The samples come from groups of 16-turn episodes whose thinking is stripped at every user turn, so that there is one
sample per turn (its full prompt and its completion). All episodes of a group have the same system prompt and first user
message. The ideal speed-up is the number of tokens in the samples divided by the number of distinct (prefix, token)
pairs. The measured speed-up includes all work of a step, also the work that a tree does not share: the logits of the
targets, and the optimizer. Steps of both packings are taken in turns on one thread, and are timed in processor time,
which other processes do not affect; ratios are of medians. A load without shared prefixes shows what the tree packer
costs if there is nothing to gain. Peak memory is the highest resident memory of a child process during a step, minus
its memory after a small step. It consists of saved activations, masks, and gradients of activations.

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
"""Number of turns in an episode (`TURNS`), and numbers of tokens in its parts."""
VOCAB = 4096
THINK = VOCAB - 1
"""The id with which every completion begins, and which occurs in no message."""
BUDGETS = (4096, 8192, 16_384)
"""Sizes of micro-batches, in tokens, for which the tokens repeated because of cuts are counted."""
PACKINGS = ("rows", "tree")


def model_folder(folder: Path) -> Path:
    """Make a model with width 256, 4 layers, 4 query heads and 2 key/value heads; returns its folder."""
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
    """Make a sample of these tokens, trained from `start` on. Its logprobs are those of a uniform policy."""
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
    """Make the samples of a group, one per turn. A sample is the history without thinking, followed by the turn's
    thinking and answer."""
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
    """Make 16 samples of 200 to 1,700 tokens without shared prefixes. The last third of each sample is trained."""
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
    """Measure steps with rows and with a tree in turns."""
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
    """The names of the attention plans that a step uses."""
    plans = (DeviceBatch(micro_batch, trainer.device).plan for micro_batch in trainer.packer.pack(samples))
    return ", ".join(sorted({type(plan).__name__ for plan in plans}))


def print_peak_memory(args: argparse.Namespace) -> None:
    """Print by how many bytes a step raises the resident memory. Called in a new process."""
    trainer = make_trainer(Path(args.model), args.peak_memory, args.micro_batch_tokens)
    samples = group(args.episodes, 64)
    trainer.train_batch(samples[:2])  # loads libraries and creates the optimizer's state
    before = resident_bytes("VmRSS")
    trainer.train_batch(samples)
    print(resident_bytes("VmHWM") - before)


def memory(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the peak memory of both packings, with the same maximum number of tokens in a micro-batch."""
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
