"""Defines the results of each optimizer step on a batch, and computes the metrics of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.trainer.packing import num_tokens
from verbatim.trainer.router_replay import replayed_share


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedPart:
    """The results of one optimizer step, which trains one part of a batch."""

    num_trained: int
    """Number of targets whose gradient was taken."""
    denominator: int
    """Divisor of the summed loss: the number of trained tokens or of trajectories."""
    loss_sum: float
    """The loss summed over the part, before division."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    micro_batches: Sequence[MicroBatch] = ()
    """The micro-batches of all ranks in this optimizer step."""
    tokens: Sequence[TrainedTokens] = ()
    """The values of each sample's trained tokens; empty if they are not kept."""


def batch_metrics(samples: Sequence[TrainingSample], parts: Sequence[TrainedPart]) -> dict[str, float]:
    """The metrics that `Trainer.train_batch` lists, except for the loss's own metrics and the timings.

    Args:
        samples: The batch.
        parts: The batch's optimizer steps, which together train each of the batch's trained tokens once.
    """
    packed = [micro_batch for part in parts for micro_batch in part.micro_batches]
    num_trained = sum(part.num_trained for part in parts)
    expected = sum(sample.num_trained_tokens for sample in samples)
    assert num_trained == expected, f"trained {num_trained} of {expected} tokens"
    computed = num_tokens(packed)
    return {
        **replayed_share(packed),
        "loss": sum(part.loss_sum for part in parts) / sum(part.denominator for part in parts) if parts else math.nan,
        "grad_norm": sum(part.grad_norm for part in parts) / len(parts) if parts else math.nan,
        "lr": parts[-1].lr if parts else math.nan,
        "trained_tokens": num_trained,
        "num_tokens": computed,
        "num_micro_batches": len(packed),
        "num_optimizer_steps": len(parts),
        "packing/sample_tokens": sum(len(sample) for sample in samples if sample.num_trained_tokens),
        "packing/repeated_tokens": sum(micro_batch.num_repeated_tokens for micro_batch in packed),
        "packing/tree": num_tokens([m for m in packed if not m.is_rows]) / max(1, computed),
    }
