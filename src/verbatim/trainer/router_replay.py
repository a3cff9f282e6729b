"""Checks recorded experts before they are replayed in the trainer, and counts the targets that have them.

"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370) calls it rollout
routing replay: sampler and trainer compute the same logits up to rounding, but where two experts are almost tied,
rounding decides which one computes a token, and its logprob changes by much more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.errors import UsageError
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.models.experts import Routers, refuse_limited_groups


def check_experts(samples: Sequence[TrainingSample], routers: Routers | None, name: str) -> None:
    """Refuse recorded experts that are not those of this model.

    Args:
        samples: Of a batch.
        routers: Of the model in training; None: it has none that can be told what to choose.
        name: The model's class.

    Raises:
        UsageError: they are of another model.
    """
    routed = [sample.routed_experts.experts for sample in samples if sample.routed_experts is not None]
    if not routed:
        return
    if routers is None:
        raise UsageError(
            f"the samples have recorded experts, but {name} has no routers that can be told what to "
            "choose; set inference.return_routed_experts = false"
        )
    refuse_limited_groups(routers)
    for experts in routed:
        if (problem := routers.routing.problem(experts)) is not None:
            raise UsageError(f"{problem} ({name}); they were sampled from another model")


def replayed_share(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """`router/replayed`: of the targets, the share whose token before them is computed by recorded experts. Nothing
    where no experts are recorded at all."""
    if all(micro_batch.routed_experts is None for micro_batch in micro_batches):
        return {}
    known = sum(
        int(m.routed_experts.known[m.targets.source_positions].sum())
        for m in micro_batches
        if m.routed_experts is not None
    )
    return {"router/replayed": known / max(1, sum(len(m.targets) for m in micro_batches))}
