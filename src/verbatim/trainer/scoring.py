"""Computes the policy's logprobs of samples, and brings those of all micro-batches back to their samples."""

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
    """The samples, each as a trajectory of its own whose id is the sample's number: as `by_sample` reads it."""
    return [dataclasses.replace(sample, trajectory_id=str(number)) for number, sample in enumerate(samples)]


@torch.no_grad()
def target_logprobs(
    lm: TargetLogprobs, own: Sequence[MicroBatch], ranks: Ranks | None, *, rounded: bool
) -> list[Float32]:
    """The logprobs of the targets of this rank's micro-batches, [M] each; of a micro-batch that several ranks share,
    all of its targets. All ranks call it. Where they are `rounded`, each layer gives bfloat16 to the next one."""
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
    """The logprobs of each sample: float32 [L], NaN where nothing was asked for.

    Args:
        samples: As they were given to `numbered`.
        dealt: Their micro-batches, by rank, or by group of ranks that share each of them.
        found: What `target_logprobs` returned on each rank.
    """
    out = [np.full(len(sample), np.nan, dtype=np.float32) for sample in samples]
    by_group = found[:: len(found) // len(dealt)]  # ranks that share micro-batches have the same
    for micro_batches, logprobs in zip(dealt, by_group, strict=True):
        for micro_batch, logprobs_M in zip(micro_batches, logprobs, strict=True):
            targets = micro_batch.targets
            for number, trajectory_id in enumerate(micro_batch.trajectory_ids):
                mine = targets.trajectories == number
                out[int(trajectory_id)][targets.offsets[mine]] = logprobs_M[mine]
    return out


@contextmanager
def _rounded_layers(model: Any) -> Iterator[None]:
    """A context in which the decoder layers of a model round what they return to bfloat16, to see how far logprobs move
    by rounding alone; None: as ever.

    An engine in bfloat16 keeps that sum of all layers so far in 8 bits. A trainer in bfloat16 rounds the factors of its
    products, and keeps the sum in float32. How far they are from each other depends on the model: on its depth, and on
    how sharp its logits are.
    """
    hooks = [] if model is None else [layer.register_forward_hook(_round) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """The output, a tensor or a tuple whose first element is one, with 8 bits for each number."""
    if isinstance(output, tuple):
        return (_rounded(output[0]), *output[1:])
    return _rounded(output)


def _rounded(hidden: Tensor) -> Tensor:
    return hidden.to(torch.bfloat16).to(hidden.dtype)
