"""Checks trees before the first are trained: a few samples must have the same gradient as a tree and as rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from verbatim.core.token_tree import common_prefix_length
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.models.own_attention import SMALL, Gradient, differences, gradient, weights_of
from verbatim.trainer.logprobs import ChunkLogprobs, TargetLogprobs
from verbatim.trainer.optimizer_state import local
from verbatim.trainer.packing import pack_rows, pack_tree
from verbatim.trainer.packing.layout import token_order
from verbatim.trainer.parallel.sharding import Sharding

logger = logging.getLogger(__name__)

MOST_TOKENS = 2048
"""Most tokens of the samples that are compared; one pair may be longer."""
ROOM = 1.5
"""In bfloat16: how much farther from the gradient in float32 trees may be than rows."""


def pack_both_ways(samples: Sequence[TrainingSample]) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Some of the samples that share prefixes, in rows and in trees."""
    sharing = sharing_samples(samples)
    total = sum(map(len, sharing))
    rows, trees = (pack(sharing, micro_batch_tokens=total, keep_whole=False) for pack in (pack_rows, pack_tree))
    return rows, trees


def trees_are_right(
    lm: TargetLogprobs,
    rows: Sequence[MicroBatch],
    trees: Sequence[MicroBatch],
    *,
    tolerance: float,
    exact: TargetLogprobs | None = None,
    sharding: Sharding | None = None,
) -> bool:
    """Whether the gradient of samples packed as trees is that of the same samples as rows; a warning where it is not.

    The gradient is that of a sum of logprobs in which every target has a weight of its own: the run's loss may be flat
    or refuse these samples, and what packing can get wrong lies before it. Where the gradient of the rows is not finite
    itself there is nothing to compare.

    In bfloat16 rounding grows with the depth of a model, beyond any fixed tolerance. There trees may be as far from the
    gradient in float32 as rows are, and half as far again.

    Args:
        lm: Its model's gradients are empty, before and after.
        rows: As `pack_both_ways` has made them.
        trees: The same samples.
        tolerance: The largest relative difference that rounding explains in any case.
        exact: The same model without rounding to bfloat16; None: `lm` does not round, or the model is sharded.
        sharding: Of a sharded model, all of whose ranks call this; all but one with no micro-batch.
    """
    expected, found = (
        gradient(lm.model.model, partial(_backward, lm, micro_batches, sharding)) for micro_batches in (rows, trees)
    )
    if sharding is None:
        finite = all(bool(grad.isfinite().all()) for grad in expected.values())
        by_name = differences(found, expected)
        if exact is not None and max(by_name.values(), default=0.0) > tolerance:
            tolerance, by_name = _beside_float32(exact, rows, found, expected, tolerance)
    else:
        finite, by_name = _differences_of_shards(found, expected, sharding)
    if not finite:
        return True
    difference, name = max(((value, name) for name, value in by_name.items()), default=(0.0, ""))
    if difference > tolerance:
        logger.warning(
            "prefix trees do not have the gradient of rows here: %s differs by %.1e, expected at most %.0e; packing "
            'falls back to rows for this run; set trainer.packing = "rows" to silence',
            name,
            difference,
            tolerance,
        )
    return difference <= tolerance


def _beside_float32(
    exact: TargetLogprobs, rows: Sequence[MicroBatch], found: Gradient, expected: Gradient, tolerance: float
) -> tuple[float, dict[str, float]]:
    """How far trees (`found`) may be from the gradient in float32, given how far rows (`expected`) are; and how far."""
    with exact.autocast():  # the backward pass too, where activations are recomputed
        in_float32 = gradient(exact.model.model, partial(_backward, exact, rows, None))
    of_rows = max(differences(expected, in_float32).values(), default=0.0)
    return max(tolerance, ROOM * of_rows), differences(found, in_float32)


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


def _differences_of_shards(found: Gradient, expected: Gradient, sharding: Sharding) -> tuple[bool, dict[str, float]]:
    """Whether the expected gradient is finite, and `differences`, over all ranks."""
    names = sorted(expected.keys() | found.keys())

    def squares(name: str) -> list[float]:
        here = local(found[name] if name in found else expected[name])
        a, b = (local(grads[name]) if name in grads else torch.zeros_like(here) for grads in (found, expected))
        return [float(x.double().square().sum()) for x in (a - b, b)]

    squared = torch.tensor([squares(name) for name in names], dtype=torch.float64, device="cpu")
    pairs = sharding.total(squared).sqrt()
    if not pairs[:, 1].isfinite().all():
        return False, {}
    norms = pairs[:, 1].clamp(min=max(SMALL * float(pairs[:, 1].max()), 1e-30))
    relative = (pairs[:, 0] / norms).nan_to_num(nan=torch.inf)
    return True, dict(zip(names, relative.tolist(), strict=True))


def _backward(lm: TargetLogprobs, micro_batches: Sequence[MicroBatch], sharding: Sharding | None) -> None:
    most = len(micro_batches) if sharding is None else sharding.most(len(micro_batches))
    for micro_batch in micro_batches:
        batch = lm.batch(micro_batch)
        weights_M = weights_of(batch.offsets_M)

        def weighted(at: slice, found: ChunkLogprobs, weights_M: Tensor = weights_M) -> Tensor:
            return weights_M[at].to(found.logprobs_M.dtype)

        lm.backward(lm.hidden(batch), batch, weighted)
    for _ in range(most - len(micro_batches)):
        lm.idle_pass()
    if sharding is not None:
        sharding.drop_unused()
