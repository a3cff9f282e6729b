"""Compares one optimizer step with a step of plain `transformers` on the same tokens, and measures the memory that the
logprobs of the targets take.

The plain step is hand-written, with full logits, an importance-weighted policy gradient, a backward pass, clipping and
fused AdamW. It arranges the same rows in the fastest way that `transformers` offers. Candidates are batches sorted by
length and padded on the right (where a causal model needs no mask), and rows packed end to end by `position_ids`, both
at several batch sizes. The fastest candidate is determined in each run. The two steps are taken in turns, so that a
busy machine slows both; the ratio is of medians.

Prints one JSON line. Run: OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/train_step.py
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config

from verbatim.algorithms.losses import LOSSES
from verbatim.config import load_config
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.trajectories import build
from verbatim.core.types import TrainingSample
from verbatim.environments.guess_number import GuessNumber
from verbatim.models.build import build_model
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.models.trained_tokenizer import chat_text
from verbatim.rollouts import trajectory_from_messages
from verbatim.trainer.linear import use_onednn
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.optim import build_optimizer
from verbatim.trainer.trainer import Trainer

RECIPE = Path(__file__).parents[1] / "recipes" / "guess_number.toml"
OPTIM = OptimConfig(lr=1e-4, max_grad_norm=1.0)
BUDGETS = (1024, 2048, 4096, 8192, 16_384)
"""The sizes of the plain step's micro-batches that are tried, in tokens including padding."""
PACKINGS = ("rows", "auto")
"""The packings of our trainer. "rows" computes every token, as the plain step does; "auto" computes shared prefixes
only once if that saves tokens."""
MEMORY_TARGETS, MEMORY_VOCAB, MEMORY_WIDTH = 8192, 151_936, 64


# ---- the cases: each writes a model into a folder and returns samples


def demo_case(folder: Path) -> list[TrainingSample]:
    """Make the demo's model, and samples of 256 of its games."""
    game, config = GuessNumber(), load_config(RECIPE)
    shown = game.demonstrations(256, 0)
    build_model(folder, config.model.build, [chat_text(d.messages, d.tools) for d in game.demonstrations(1000, 1)], 0)
    renderer = create_renderer("auto", load_tokenizer(folder))
    played = [
        trajectory_from_messages(renderer, d.messages, d.tools, trajectory_id=str(i)) for i, d in enumerate(shown)
    ]
    return [sample for trajectory in played for sample in build(trajectory, needs_logprobs=False).samples]


def large_case(folder: Path) -> list[TrainingSample]:
    """Make a model with width 512, 8 layers and a vocabulary of 32,000, and 4 rows of 200 to 1,500 tokens, a third of
    which are trained."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    return [random_sample(rng, length, str(i)) for i, length in enumerate((200, 450, 800, 1500))]


def tool_case(folder: Path) -> list[TrainingSample]:
    """Make a model with 0.9M parameters (4 layers, width 128, untied embeddings, vocabulary of 512), and samples of 128
    episodes with four tool calls each, in groups of 16. An episode has an opening of 300 tokens, of which 280 (system
    prompt and tool schema) are the same in all groups, then calls of 22 or 23 sampled tokens, 90 in total, with a
    tool's answer of 20 tokens between two calls."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    lengths = ((300, 22), (20, 23), (20, 22), (20, 23))
    turns = [np.repeat([False, True], both) for both in lengths]
    mask = np.concatenate(turns)
    chunks = np.where(mask, np.repeat(np.arange(4), list(map(len, turns))), -1).astype(np.int32)
    system, samples = rng.integers(0, 512, 280), []
    for group in range(8):
        opening = np.append(system, rng.integers(0, 512, 20))
        for member in range(16):
            sampled = rng.integers(0, 512, len(mask) - len(opening))
            samples.append(sample_of(np.append(opening, sampled), mask, chunks, f"{group}-{member}"))
    return samples


def random_sample(
    rng: np.random.Generator, length: int, trajectory_id: str, *, vocab_size: int = 32_000
) -> TrainingSample:
    """Draw a sample with turns of 60 tokens, of which the last 20 are trained."""
    mask = np.arange(length) % 60 >= 40
    chunks = np.where(mask, np.arange(length) // 60, -1).astype(np.int32)
    return sample_of(rng.integers(0, vocab_size, length), mask, chunks, trajectory_id)


def sample_of(token_ids: np.ndarray, mask: np.ndarray, chunks: np.ndarray, trajectory_id: str) -> TrainingSample:
    """Make a sample without logprobs and advantages."""
    length = len(mask)
    return TrainingSample(
        token_ids=token_ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.full(length, np.nan, np.float32),
        advantages=np.zeros(length, np.float32),
        chunk_ids=chunks,
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(length, np.float32),
        trajectory_id=trajectory_id,
    )


def as_sampled(trainer: Trainer, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Add logprobs and advantages to the samples, as in reinforcement learning. The logprobs are those of a policy
    close to the trainer's."""
    rng = np.random.default_rng(1)
    return [
        replace(
            sample,
            logprobs=(logprobs + 0.01 * rng.standard_normal(len(sample))).astype(np.float32),
            advantages=np.where(sample.loss_mask, rng.choice([-0.5, 0.5]), 0).astype(np.float32),
        )
        for sample, logprobs in zip(samples, trainer.logprobs(samples), strict=True)
    ]


# ---- the step of plain `transformers`


@dataclass(frozen=True)
class Layout:
    """One way in which the plain step arranges rows in micro-batches."""

    kind: str
    """"padded" or "packed"."""
    budget: int
    """Maximum number of tokens in a micro-batch, including padding, unless a single row is longer."""

    def groups(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """Split the samples into micro-batches of rows with similar lengths, longest first, with as many rows as fit
        into the budget."""
        groups: list[list[TrainingSample]] = []
        used = 0
        for sample in sorted(samples, key=len, reverse=True):
            size = len(groups[-1][0]) if groups and self.kind == "padded" else len(sample)
            if not groups or used + size > self.budget:
                groups.append([])
                used, size = 0, len(sample)
            groups[-1].append(sample)
            used += size
        return groups

    def lay(self, arrays: Sequence[np.ndarray], fill: float) -> Tensor:
        """Arrange rows as one batch: [B, L] if padded, or [1, L] end to end."""
        if self.kind == "packed":
            return torch.from_numpy(np.concatenate(arrays))[None]
        rows = np.full((len(arrays), max(map(len, arrays))), fill, arrays[0].dtype)
        for row, array in zip(rows, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(rows)


class Plain:
    """A plain trainer: forward pass, loss, backward pass, clipping and AdamW, written with only torch and
    `transformers`."""

    def __init__(self, folder: Path, device: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.device = device
        self.optimizer = build_optimizer(self.model, OPTIM)

    def step(self, samples: Sequence[TrainingSample], layout: Layout) -> float:
        """Take one optimizer step; returns the mean loss."""
        num_trained = sum(sample.num_trained_tokens for sample in samples)
        total = 0.0
        for group in layout.groups(samples):
            ids = layout.lay([s.token_ids for s in group], 0).to(self.device, torch.int64)
            labels = layout.lay([np.where(s.loss_mask, s.token_ids, -100) for s in group], -100).to(self.device)
            sampled = layout.lay([np.nan_to_num(s.logprobs) for s in group], 0).to(self.device)
            advantages = layout.lay([s.advantages for s in group], 0).to(self.device)
            kwargs = {}
            if layout.kind == "packed":
                kwargs["position_ids"] = layout.lay([np.arange(len(s)) for s in group], 0).to(self.device)
            logits = self.model(input_ids=ids, use_cache=False, **kwargs).logits[:, :-1]
            logprobs = -cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().long(), reduction="none")
            ratio = (logprobs - sampled[:, 1:].flatten()).exp()
            loss = -(advantages[:, 1:].flatten() * ratio).sum() / num_trained
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


# ---- measuring


def seconds(step: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def step_ratio(case: Callable[[Path], list[TrainingSample]], args: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of both in turns, after a round that determines the plain step's fastest layout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        samples = case(folder)
        trainers = {
            packing: Trainer(
                folder,
                TrainerConfig(optim=OPTIM, device=args.device, dtype=args.dtype, packing=packing),
                loss=LOSSES["default"],
                total_optimizer_steps=10_000,
            )
            for packing in PACKINGS
        }
        trainer = trainers["rows"]
        plain = Plain(folder, args.device)
    samples = as_sampled(trainer, samples)
    layouts = [Layout("padded", budget) for budget in BUDGETS] + [Layout("packed", budget) for budget in BUDGETS[:2]]
    layouts = [
        x
        for i, x in enumerate(layouts)
        if all(x.kind != y.kind or len(x.groups(samples)) != len(y.groups(samples)) for y in layouts[:i])
    ]
    plain.step(samples, layouts[0])  # warms up
    TRIAL = {layout: seconds(lambda at=layout: plain.step(samples, at), args.device) for layout in layouts}
    best = min(TRIAL, key=TRIAL.__getitem__)
    computed = {packing: int(t.train_batch(samples)["num_tokens"]) for packing, t in trainers.items()}
    ours: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
    theirs = []
    for _ in range(args.repeats):
        for packing, t in trainers.items():
            ours[packing].append(seconds(lambda t=t: t.train_batch(samples), args.device))
        theirs.append(seconds(lambda: plain.step(samples, best), args.device))
    num_tokens = sum(map(len, samples))
    medians = {packing: statistics.median(found) for packing, found in ours.items()}
    return {
        "ratio": round(medians["rows"] / statistics.median(theirs), 3),
        "ratio_auto_packing": round(medians["auto"] / statistics.median(theirs), 3),
        "verbatim_seconds": {packing: round(found, 4) for packing, found in medians.items()},
        "plain_seconds": round(statistics.median(theirs), 4),
        "computed_tokens": computed,
        "verbatim_tokens_per_second": round(num_tokens / medians["rows"]),
        "plain_layout": f"{best.kind}, {best.budget} tokens",
        "rows": len(samples),
        "tokens": num_tokens,
        "trained_tokens": sum(sample.num_trained_tokens for sample in samples),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "vocab_size": trainer.lm.vocab_size,
        "plain_trials": {f"{k.kind} {k.budget}": round(v, 3) for k, v in TRIAL.items()},
    }


def resident_bytes(which: str) -> int:
    """The resident memory of this process in bytes: now (`VmRSS`), or its highest value so far (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


class Head(nn.Module):
    """A stand-in for `CausalLM` that consists only of an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(MEMORY_WIDTH, MEMORY_VOCAB, bias=False)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        out: Tensor = self.output(hidden_MD)
        return out


def print_peak_memory() -> None:
    """Print by how many bytes a forward and backward pass over the head raises the resident memory. Called in a new
    process."""
    head = Head()
    use_onednn(head)
    head.output.weight.grad = torch.full_like(head.output.weight, 0.0)
    hidden = torch.randn(MEMORY_TARGETS, MEMORY_WIDTH, requires_grad=True)
    ids = torch.randint(0, MEMORY_VOCAB, (MEMORY_TARGETS,))

    model: Any = head

    def run(count: int) -> None:
        asked = SimpleNamespace(target_ids_M=ids[:count], temperatures_M=torch.ones(count), kept_sets=None)
        TargetLogprobs(model, TrainerConfig().logprob_chunk).backward(
            hidden[:count] * 1, asked, lambda at, found: -torch.ones_like(found.logprobs_M)
        )

    run(8)  # loads libraries and starts threads
    before = resident_bytes("VmRSS")
    run(MEMORY_TARGETS)
    print(resident_bytes("VmHWM") - before)


def memory_ratio() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--peak-memory"], check=True, capture_output=True, text=True)
    peak, logits = int(done.stdout), MEMORY_TARGETS * MEMORY_VOCAB * 4
    return {
        "ratio": round(peak / logits, 3),
        "peak_bytes": peak,
        "full_logits_bytes": logits,
        "targets": MEMORY_TARGETS,
        "vocab_size": MEMORY_VOCAB,
        "width": MEMORY_WIDTH,
        "measured": "peak resident memory of a child process above what it had before",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of Verbatim's forward and backward pass; plain is float32")
    parser.add_argument("--cases", nargs="*", default=["demo", "tools", "large", "memory"])
    parser.add_argument("--peak-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_memory:
        return print_peak_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "demo": lambda: step_ratio(demo_case, args),
        "tools": lambda: step_ratio(tool_case, args),
        "large": lambda: step_ratio(large_case, args),
        "memory": memory_ratio,
    }
    print(
        json.dumps(
            {
                "benchmark": "train_step",
                **{name: cases[name]() for name in args.cases},
                "repeats": args.repeats,
                "threads": torch.get_num_threads(),
                "cores": len(os.sched_getaffinity(0)),
                "device": args.device,
                "dtype": args.dtype,
            }
        )
    )


if __name__ == "__main__":
    main()
