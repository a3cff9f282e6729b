"""Checks trees before the first are trained: a few samples must have the same gradient as a tree and as rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import torch
from torch import Tensor

from verbatim.models.head import CausalLM
from verbatim.packing import pack_rows, pack_tree
from verbatim.packing.layout import token_order
from verbatim.token_tree import common_prefix_length
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.logprobs import ChunkLogprobs, backward_logprobs
from verbatim.types import MicroBatch, TrainingSample

logger = logging.getLogger(__name__)

MOST_TOKENS = 2048
"""Most tokens of the samples that are compared; one pair may be longer."""
SMALL = 1e-2
"""Parameters whose gradient is below this share of the largest one are measured against that share: some, like the
bias of keys, have a gradient of 0 that is rounding alone."""


def trees_are_right(
    model: CausalLM,
    samples: Sequence[TrainingSample],
    *,
    chunk: int,
    autocast: Callable[[], AbstractContextManager[object]],
    tolerance: float,
) -> bool:
    """Whether some of the samples that share prefixes have the gradient of rows; a warning where they do not.

    Args:
        model: Its gradients are empty, before and after.
        samples: The samples of one optimizer step.
        chunk: Targets whose vocabulary-sized logits exist at one time.
        autocast: Makes the context of forward passes.
        tolerance: The largest relative difference that rounding explains.
    """
    name, difference = largest_difference(model, sharing_samples(samples), chunk=chunk, autocast=autocast)
    if difference > tolerance:
        logger.warning(
            "prefix trees do not have the gradient of rows here: %s differs by %.1e, expected at most %.0e; packing "
            'falls back to rows for this run; set trainer.packing = "rows" to silence', name, difference, tolerance,
        )  # fmt: skip
    return difference <= tolerance


def sharing_samples(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The shortest pairs of samples that share a prefix, as many as fit: those that branch first, then those of which
    one continues the other."""
    ordered = sorted((sample for sample in samples if sample.num_trained_tokens), key=token_order)
    pairs = []
    for i, (a, b) in enumerate(pairwise(ordered)):
        shared = common_prefix_length(a.token_ids, b.token_ids)
        if shared:
            pairs.append((shared == min(len(a), len(b)), len(a) + len(b), i))
    chosen: set[int] = set()
    for _, _, i in sorted(pairs):
        wider = chosen | {i, i + 1}
        if chosen and sum(len(ordered[j]) for j in wider) > MOST_TOKENS:
            break
        chosen = wider
    return [ordered[i] for i in sorted(chosen)]


def largest_difference(
    model: CausalLM,
    samples: Sequence[TrainingSample],
    *,
    chunk: int,
    autocast: Callable[[], AbstractContextManager[object]],
) -> tuple[str, float]:
    """The parameter whose gradient differs most between rows and tree, and by how much: norm of the difference over
    the norm. Where the gradient of the rows is not finite itself there is nothing to compare, and that is 0.

    The gradient is that of a sum of logprobs in which every target has a weight of its own: the run's loss may be flat
    or refuse these samples, and what packing can get wrong lies before it.
    """
    parameters = dict(model.model.named_parameters())
    total = sum(map(len, samples))

    def norms() -> Tensor:
        found = [p.new_zeros(()) if p.grad is None else p.grad.norm() for p in parameters.values()]
        return torch.stack([norm.double() for norm in found])

    try:
        _backward(model, pack_rows(samples, micro_batch_tokens=total, keep_whole=False), chunk, autocast)
        expected = norms()
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.neg_()
        _backward(model, pack_tree(samples, micro_batch_tokens=total, keep_whole=False), chunk, autocast)
        differences = norms()
    finally:
        model.model.zero_grad(set_to_none=True)
    if not expected.isfinite().all():
        return "", 0.0
    relative = (differences / expected.clamp(min=SMALL * expected.max())).nan_to_num(nan=torch.inf)
    worst = int(relative.argmax())
    return list(parameters)[worst], float(relative[worst])


def _backward(
    model: CausalLM,
    micro_batches: Sequence[MicroBatch],
    chunk: int,
    autocast: Callable[[], AbstractContextManager[object]],
) -> None:
    for micro_batch in micro_batches:
        batch = DeviceBatch.of(micro_batch, model.device)
        weights_M = torch.cos(batch.offsets_M.to(torch.float32))
        with autocast():
            hidden_MD = batch.hidden(model)

        def gradient(at: slice, found: ChunkLogprobs, weights_M: Tensor = weights_M) -> Tensor:
            return weights_M[at].to(found.logprobs_M.dtype)

        backward_logprobs(model, hidden_MD, batch.target_ids_M, batch.temperatures_M, gradient, chunk=chunk,
                          autocast=autocast)  # fmt: skip
