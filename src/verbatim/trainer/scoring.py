"""Computes the policy's logprobs of samples: scores micro-batches and maps the results back to the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verbatim.core.types import Float32, MicroBatch, TrainingSample
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.parallel.ranks import Ranks


def numbered(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples, each as a separate trajectory whose id is the sample's index; `by_sample` finds the sample by this
    id."""
    return [dataclasses.replace(sample, trajectory_id=str(number)) for number, sample in enumerate(samples)]


@torch.no_grad()
def target_logprobs(
    lm: TargetLogprobs, own: Sequence[MicroBatch], ranks: Ranks | None, *, rounded: bool
) -> list[Float32]:
    """The logprobs of the targets in this rank's micro-batches: float32 [M] each. All ranks call it.

    Args:
        lm: The model in training.
        own: This rank's micro-batches. If several ranks share a micro-batch, each of these ranks returns the logprobs
            of all targets of the micro-batch.
        ranks: The processes of the trainer; None for one process.
        rounded: Round each layer's output to bfloat16.
    """
    found = []
    most = len(own) if ranks is None else ranks.most(len(own))[0]
    with _rounded_layers(lm.model.model if rounded else None):
        for micro_batch in own:
            batch = lm.batch(micro_batch)
            logprobs = lm.forward(lm.hidden(batch), batch)
            found.append(batch.gathered(logprobs.logprobs_M).cpu().numpy())
        for _ in range(most - len(own)):
            lm.idle_pass()
    lm.model.calls.release()
    return found


def by_sample(
    samples: Sequence[TrainingSample], dealt: Sequence[Sequence[MicroBatch]], found: Sequence[Sequence[Float32]]
) -> list[Float32]:
    """The logprobs of each sample: float32 [L], NaN for tokens that are not targets.

    Args:
        samples: The samples, as given to `numbered`.
        dealt: The samples' micro-batches, by rank, or by group of ranks that share micro-batches.
        found: The results of `target_logprobs`, by rank.
    """
    out = [np.full(len(sample), np.nan, dtype=np.float32) for sample in samples]
    by_group = found[:: len(found) // len(dealt)]  # ranks of a group have the same logprobs: take the first's
    for micro_batches, logprobs in zip(dealt, by_group, strict=True):
        for micro_batch, logprobs_M in zip(micro_batches, logprobs, strict=True):
            targets = micro_batch.targets
            for number, trajectory_id in enumerate(micro_batch.trajectory_ids):
                mine = targets.trajectories == number
                out[int(trajectory_id)][targets.offsets[mine]] = logprobs_M[mine]
    return out


@contextmanager
def _rounded_layers(model: Any) -> Iterator[None]:
    """Context manager in which a model's decoder layers round their outputs to bfloat16. If the model is None, nothing
    changes.

    This serves to measure how far rounding alone moves logprobs. An engine in bfloat16 keeps the residual stream (the
    sum of all layers so far) in 8 bits. A trainer in bfloat16 rounds the factors of its matrix products, but keeps the
    residual stream in float32. How far the two diverge depends on the model's depth and on how peaked its logits are.
    """
    hooks = [] if model is None else [layer.register_forward_hook(_round) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """Round a layer's output (a tensor, or a tuple that starts with one) to bfloat16 precision, keeping its dtype."""
    if isinstance(output, tuple):
        return (_rounded(output[0]), *output[1:])
    return _rounded(output)


def _rounded(hidden: Tensor) -> Tensor:
    return hidden.to(torch.bfloat16).to(hidden.dtype)
