"""What came of a batch: of each of its optimizer steps, and in numbers of the whole."""

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
    """One optimizer step: the part of the batch that it was taken on, and what came of it."""

    num_trained: int
    denominator: int
    loss_sum: float
    grad_norm: float
    lr: float
    micro_batches: Sequence[MicroBatch] = ()
    tokens: Sequence[TrainedTokens] = ()
    """The tokens of each sample, if they are kept."""


def batch_metrics(samples: Sequence[TrainingSample], parts: Sequence[TrainedPart]) -> dict[str, float]:
    """The metrics of a batch that `Trainer.train_batch` says, but for those of the loss and the seconds.

    Args:
        samples: The batch.
        parts: Its optimizer steps, which together trained every token of it once.
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
