"""Simulates how an optimizer step is dealt to ranks, and computes the share of the step for which ranks wait for each
other.

Each batch has 512 multi-turn trajectories, one row each, whose lengths have a long tail (log-normal between 1,000 and
64,000 tokens, median 8,000). Batches are dealt in the same way as by `verbatim.trainer.packing.ranks`. The cost of a
micro-batch is predicted from the shape of a model, and ranks start each pass together. If one trajectory costs more
than a rank's share of the batch, the step waits for this trajectory, however the batch is dealt. Such batches are
counted, and left out of the mean. Prints one JSON line.

    python benchmarks/balance.py [--batches 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from verbatim.trainer.packing.cost import CostModel, model_cost
from verbatim.trainer.packing.deal import Piece, deal, lock_step_time

TRAJECTORIES, SHORTEST, LONGEST, MEDIAN, SIGMA = 512, 1_000, 64_000, 8_000, 1.0
TRAINED = 0.3
"""Share of a trajectory's tokens that are targets of the loss."""
RANKS = (8, 32, 64)
MICRO_BATCH_TOKENS = (16_384, 65_536, 131_072, 262_144)
MODELS = {
    "0.6B": SimpleNamespace(
        hidden_size=1024,
        num_attention_heads=16,
        head_dim=128,
        num_key_value_heads=8,
        intermediate_size=3072,
        num_hidden_layers=28,
        vocab_size=151_936,
    ),
    "8B": SimpleNamespace(
        hidden_size=4096,
        num_attention_heads=32,
        head_dim=128,
        num_key_value_heads=8,
        intermediate_size=12_288,
        num_hidden_layers=36,
        vocab_size=151_936,
    ),
}
"""The shapes of Qwen3 models. In a smaller model, attention is a larger share of the work."""


def draw_batch(rng: np.random.Generator, cost: CostModel) -> list[Piece]:
    """Draw the trajectories of one batch."""
    drawn = np.exp(rng.normal(np.log(MEDIAN), SIGMA, 8 * TRAJECTORIES))
    lengths = drawn[(drawn >= SHORTEST) & (drawn <= LONGEST)][:TRAJECTORIES].astype(np.int64)
    costs = cost.runs(np.zeros_like(lengths), lengths, (TRAINED * lengths).astype(np.int64))
    return [Piece(cost=c, tokens=n) for c, n in zip(costs.tolist(), lengths.tolist(), strict=True)]


def measure(cost: CostModel, num_ranks: int, most_tokens: int, num_batches: int) -> dict[str, float]:
    """Deal the batches for one setting; returns the figures."""
    rng = np.random.default_rng(0)
    idle, passes, seconds, uneven = [], [], [], 0
    for _ in range(num_batches):
        pieces = draw_batch(rng, cost)
        began = time.process_time()
        dealt = deal(pieces, num_ranks=num_ranks, most_tokens=most_tokens)
        seconds.append(time.process_time() - began)
        if max(piece.cost for piece in pieces) > sum(piece.cost for piece in pieces) / num_ranks:
            uneven += 1
            continue
        idle.append(1 - sum(map(sum, dealt.costs)) / (len(dealt.costs) * lock_step_time(dealt.costs)))
        passes.append(dealt.num_passes)
    return {
        "longer_than_a_share": uneven,
        "milliseconds": round(1000 * statistics.median(seconds), 1),
        **({"idle": round(statistics.fmean(idle), 4), "passes": statistics.fmean(passes)} if idle else {}),
    }


def figures(num_batches: int) -> Iterator[tuple[str, dict[str, float]]]:
    for model, shape in MODELS.items():
        for most_tokens in MICRO_BATCH_TOKENS:
            for num_ranks in RANKS:
                name = f"{model}, {most_tokens} tokens, {num_ranks} ranks"
                yield name, measure(model_cost(shape), num_ranks, most_tokens, num_batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    print(json.dumps(dict(figures(parser.parse_args().batches))))


if __name__ == "__main__":
    main()
