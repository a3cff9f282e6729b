"""The tree check: before a run trains on trees, a few samples must give the same gradient when packed as trees and as
rows."""

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

MOST_TOKENS = 1024
"""Maximum number of tokens in all samples to compare; a single pair may be longer."""
ROOM = 1.5
"""In bfloat16, the error of trees may be this many times the error of rows, both relative to the float32 gradient."""


def pack_both_ways(samples: Sequence[TrainingSample]) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Some of the samples that share prefixes, packed as rows and as trees."""
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
    """True if the samples give the same gradient when packed as trees and as rows; logs a warning if they do not.

    The gradient compared is not that of the run's loss, but that of a sum of logprobs with a different weight for every
    target: the loss may be flat or refuse these samples, and packing only affects what comes before the loss. If the
    gradient of the rows is not finite, there is nothing to compare, and the result is True.

    In bfloat16, rounding errors grow with the depth of a model, beyond any fixed tolerance. Trees may then be up to
    `ROOM` times as far from the float32 gradient as rows are.

    Args:
        lm: The model in training. Its gradients must be empty, and are empty afterwards.
        rows: The samples as rows, from `pack_both_ways`.
        trees: The same samples as trees.
        tolerance: The largest relative difference that rounding explains in any case.
        exact: The same model without rounding to bfloat16; None if `lm` does not round, or if the model is sharded.
        sharding: The model's sharding: all its ranks call this, most of them without micro-batches; None for one
            process.
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
            'falls back to rows for this run; set trainer.packing = "rows" to silence this warning',
            name,
            difference,
            tolerance,
        )
    return difference <= tolerance


def _beside_float32(
    exact: TargetLogprobs, rows: Sequence[MicroBatch], found: Gradient, expected: Gradient, tolerance: float
) -> tuple[float, dict[str, float]]:
    """Return (1) the tolerance for trees (`found`), derived from the error of rows (`expected`), and (2) the
    differences of trees by parameter. All are relative to the float32 gradient."""
    with exact.autocast():  # this includes the backward pass, which recomputes layers with checkpointing
        in_float32 = gradient(exact.model.model, partial(_backward, exact, rows, None))
    of_rows = max(differences(expected, in_float32).values(), default=0.0)
    return max(tolerance, ROOM * of_rows), differences(found, in_float32)


def sharing_samples(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The shortest pairs of samples that share a prefix, up to `MOST_TOKENS`. Pairs that branch come first. A pair in
    which one sample continues the other comes later, because it is a single path and tests less."""
    # In token order, the samples with the longest common prefix are neighbours.
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
    """Return (1) True if the expected gradient is finite, and (2) the relative differences by parameter, over the
    shards of all ranks."""
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
    """Accumulate the gradient of the weighted sum of logprobs, with idle passes to keep ranks in step."""
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
