"""Checks a model before training: on a tiny copy, packed logprobs and gradients must match the model's own
attention."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.core.types import TrainingSample
from verbatim.models.head import CausalLM
from verbatim.models.own_attention import (
    LENGTH,
    TOLERANCE,
    Gradient,
    TinyPair,
    gradient,
    largest_difference,
    mask_settings,
    probe_ids,
    tiny_pair,
    weights_of,
)
from verbatim.models.refusal import FAULTS, describe
from verbatim.models.round_trip import check_round_trip
from verbatim.models.tiny import NoTinyCopy
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.logprobs import whole_sample
from verbatim.trainer.packing import find_packer

logger = logging.getLogger(__name__)


def packing_for(model: CausalLM, packing: str) -> str:
    """The packing to train a model with: the configured one, or "rows" if "auto" would compute trees wrongly.

    Args:
        model: The model, as loaded.
        packing: "rows", "tree", "auto", or the import path of a custom packer, which is checked in the same way.

    Raises:
        ModelError: in rows or in the configured packing, the tiny copy's logprobs or gradient differ from the results
            of `transformers`; or weights saved from the tiny copy cannot be loaded again.
    """
    if model.rows_alone:  # `transformers` itself computes each row in a forward pass, so there is nothing to compare
        _refuse_without_gradient(model)
        return "rows"
    pair = tiny_pair(model.model, planned=True)
    check_round_trip(pair.own)
    name = f"{type(model.model).__name__}{mask_settings(model.model.config)}"
    samples = _samples(pair)
    expected = own_gradient(pair, samples)
    fault = packed_fault(pair, samples, expected, "rows")
    if fault is not None:
        raise ModelError(f"{name} cannot be trained: in a small copy, {fault}; use a model of another class")
    if packing == "rows":
        return "rows"
    fault = packed_fault(pair, samples, expected, "tree" if packing == "auto" else packing)
    if fault is None:
        return packing
    if packing != "auto":
        how = "as trees" if packing == "tree" else f"by {packing}"
        raise ModelError(f'{name} cannot be packed {how}: in a small copy, {fault}; set trainer.packing = "rows"')
    logger.warning('%s: packing falls back to "rows", because in a small copy packed as trees, %s', name, fault)
    return "rows"


def _refuse_without_gradient(model: CausalLM) -> None:
    """Refuse a model class whose backward pass fails: the trainer runs models in eval mode, in which some classes have
    no backward pass."""
    try:
        pair = tiny_pair(model.model, planned=False)
    except NoTinyCopy:  # the model keeps its own attention, so it can be trained without a comparison
        return
    ids = probe_ids(pair, 8)
    try:
        gradient(pair.own, lambda: torch.autograd.backward(pair.own_logprobs(ids).sum()))
    except FAULTS as error:
        raise ModelError(
            f"{type(model.model).__name__} cannot be trained: its backward pass fails "
            f"({describe(error)}); use a model of another class"
        ) from error


def own_gradient(pair: TinyPair, samples: Sequence[TrainingSample]) -> tuple[list[Tensor], Gradient]:
    """Each sample's logprobs from `transformers`' own forward pass, and the gradient of their weighted sum."""
    logprobs: list[Tensor] = []

    def backward() -> None:
        logprobs[:] = [pair.own_logprobs(torch.tensor(s.token_ids, dtype=torch.int64)) for s in samples]
        weighted = [x @ weights_of(torch.arange(1, len(x) + 1)) for x in logprobs]
        torch.autograd.backward(torch.stack(weighted).sum())

    found = gradient(pair.own, backward)
    return [x.detach() for x in logprobs], found


def packed_fault(
    pair: TinyPair, samples: Sequence[TrainingSample], expected: tuple[list[Tensor], Gradient], packing: str
) -> str | None:
    """Explain, as a clause for a message, how packed samples differ from `expected` (the result of `own_gradient`);
    None if they agree."""
    total = 2 * sum(map(len, samples))  # room for all samples in one micro-batch
    micro_batches = find_packer(packing)(samples, micro_batch_tokens=total, keep_whole=False)
    worst = 0.0

    def backward() -> None:
        nonlocal worst
        sums = []
        for micro_batch in micro_batches:
            batch = DeviceBatch(micro_batch, torch.device("cpu"))
            logits_MV = pair.ours.logits(batch.hidden(pair.ours)).float()
            found_M = logits_MV.log_softmax(-1).gather(1, batch.target_ids_M[:, None])[:, 0]
            own_M = torch.stack(
                [
                    expected[0][int(micro_batch.trajectory_ids[int(number)])][offset - 1]
                    for number, offset in zip(micro_batch.targets.trajectories, batch.offsets_M, strict=True)
                ]
            )
            worst = max(worst, float((found_M.detach() - own_M).abs().nan_to_num(nan=torch.inf).max()))
            sums.append((found_M * weights_of(batch.offsets_M)).sum())
        torch.autograd.backward(torch.stack(sums).sum())

    try:
        found = gradient(pair.ours.model, backward)
    except FAULTS as error:
        return f"the forward or backward pass fails ({describe(error)})"
    if worst > TOLERANCE:
        return f"logprobs differ by {worst:.1g} from those of its own attention"
    difference = largest_difference(found, expected[1])
    if difference > TOLERANCE:
        return f"the gradient differs by {difference:.1g} of its norm from that of its own attention"
    return None


def _samples(pair: TinyPair) -> list[TrainingSample]:
    """Three samples that share a prefix, and one that shares nothing; each longer than a tiny copy's window."""
    ids = probe_ids(pair, 4 * LENGTH).numpy().astype(np.int32)
    trunk, rest = ids[: LENGTH // 2], ids[LENGTH // 2 :]
    half = LENGTH // 2
    branches = [np.concatenate([trunk, rest[i * half : (i + 1) * half - 3 * i]]) for i in range(3)]
    return [whole_sample(token_ids, str(i)) for i, token_ids in enumerate([*branches, rest[3 * half : 4 * half]])]
