"""Measures the duration of a trainer's step with `trainer.compile`, relative to its duration without, on a CPU.

Two models are measured: the demo's model (0.66M parameters, on the demo's games), and a model with 10M parameters
(width 320, 7 layers, vocabulary of 4,096, rows of 200 to 1,500 tokens, a third of which are trained). The two trainers
take steps in turns, so that a busy machine slows both; ratios are of medians. The first step of each trainer is left
out; the difference between the two first steps is reported as the time that compiling takes.

Prints one JSON line. Run: OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/compiled_layers.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from train_step import OPTIM, as_sampled, demo_case, random_sample
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.core.types import TrainingSample
from verbatim.trainer.trainer import Trainer

PACKINGS = ("rows", "auto")
VOCAB = 4096


def middle_case(folder: Path) -> list[TrainingSample]:
    """Make a model with 10M parameters in the folder, and 4 rows of 200 to 1,500 tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    return [random_sample(rng, length, str(i), vocab_size=VOCAB) for i, length in enumerate((200, 450, 800, 1500))]


CASES: dict[str, Callable[[Path], list[TrainingSample]]] = {"demo": demo_case, "10M": middle_case}


def compare(folder: Path, samples: Sequence[TrainingSample], packing: str, rounds: int) -> dict[str, Any]:
    """Take steps with and without compiling in turns; returns their durations in seconds and the ratios."""
    trainers, first = {}, {}
    for compiled in (False, True):
        began = time.perf_counter()
        config = TrainerConfig(device="cpu", packing=packing, optim=OPTIM, compile=compiled)
        trainer = Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=rounds + 9)
        if not trainers:
            samples = as_sampled(trainer, samples)
        trainer.train_batch(samples)
        trainers[compiled], first[compiled] = trainer, time.perf_counter() - began
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for compiled, trainer in trainers.items():
            began = time.perf_counter()
            trainer.train_batch(samples)
            seconds[compiled].append(time.perf_counter() - began)
    ratios = [compiled / plain for plain, compiled in zip(seconds[False], seconds[True], strict=True)]
    return {
        "seconds": statistics.median(seconds[False]),
        "seconds_compiled": statistics.median(seconds[True]),
        "ratio": statistics.median(seconds[True]) / statistics.median(seconds[False]),
        "ratio_of_pairs": [min(ratios), statistics.median(ratios), max(ratios)],
        "seconds_to_compile": first[True] - first[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    found = {}
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            samples = CASES[name](Path(folder))
            found[name] = {packing: compare(Path(folder), samples, packing, arguments.rounds) for packing in PACKINGS}
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
