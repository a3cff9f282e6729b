"""Checks trees before the first are trained: a few samples must have the same gradient as a tree and as rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from verbatim.models.own_attention import differences, gradient, weights_of
from verbatim.packing import pack_rows, pack_tree
from verbatim.packing.layout import token_order
from verbatim.token_tree import common_prefix_length
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.logprobs import ChunkLogprobs, TargetLogprobs
from verbatim.types import MicroBatch, TrainingSample

logger = logging.getLogger(__name__)

MOST_TOKENS = 2048
"""Most tokens of the samples that are compared; one pair may be longer."""


def trees_are_right(lm: TargetLogprobs, samples: Sequence[TrainingSample], *, tolerance: float) -> bool:
    """Whether some of the samples that share prefixes have the gradient of rows; a warning where they do not.

    The gradient is that of a sum of logprobs in which every target has a weight of its own: the run's loss may be flat
    or refuse these samples, and what packing can get wrong lies before it. Where the gradient of the rows is not finite
    itself there is nothing to compare.

    Args:
        lm: Its model's gradients are empty, before and after.
        samples: The samples of one optimizer step.
        tolerance: The largest relative difference that rounding explains.
    """
    sharing = sharing_samples(samples)
    total = sum(map(len, sharing))
    expected, found = (
        gradient(lm.model.model, partial(_backward, lm, pack(sharing, micro_batch_tokens=total, keep_whole=False)))
        for pack in (pack_rows, pack_tree)
    )
    if not all(grad.isfinite().all() for grad in expected.values()):
        return True
    difference, name = max(((value, name) for name, value in differences(found, expected).items()), default=(0.0, ""))
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


def _backward(lm: TargetLogprobs, micro_batches: Sequence[MicroBatch]) -> None:
    for micro_batch in micro_batches:
        batch = DeviceBatch(micro_batch, lm.model.device)
        weights_M = weights_of(batch.offsets_M)

        def weighted(at: slice, found: ChunkLogprobs, weights_M: Tensor = weights_M) -> Tensor:
            return weights_M[at].to(found.logprobs_M.dtype)

        lm.backward(lm.hidden(batch), batch.target_ids_M, batch.temperatures_M, weighted)
