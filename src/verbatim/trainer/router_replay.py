"""Checks recorded experts before the trainer replays them, and measures the share of targets that have them.

"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370) calls this
rollout routing replay. Sampler and trainer compute the same router logits up to rounding. But if two experts are almost
tied, rounding decides which one computes a token, and the token's logprob then changes by much more than rounding
error."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.errors import UsageError
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.models.experts import Routers, refuse_limited_groups


def check_experts(samples: Sequence[TrainingSample], routers: Routers | None, name: str) -> None:
    """Refuse samples whose recorded experts this model cannot replay.

    Args:
        samples: The samples of a batch.
        routers: The routers of the model in training; None if the model has no routers whose choice can be replayed.
        name: The model's class, for messages.

    Raises:
        UsageError: the experts were recorded from another model, or this model cannot replay them.
    """
    routed = [sample.routed_experts.experts for sample in samples if sample.routed_experts is not None]
    if not routed:
        return
    if routers is None:
        raise UsageError(
            f"the samples have recorded experts, but no routers are found in {name} that can replay "
            "them; set inference.return_routed_experts = false"
        )
    refuse_limited_groups(routers)
    for experts in routed:
        if (problem := routers.routing.problem(experts)) is not None:
            raise UsageError(f"{problem} ({name}); they were sampled from another model")


def replayed_share(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """The metric `router/replayed`: the share of targets whose preceding token is computed by recorded experts. Empty
    if no experts are recorded at all."""
    if all(micro_batch.routed_experts is None for micro_batch in micro_batches):
        return {}
    known = sum(
        int(m.routed_experts.known[m.targets.source_positions].sum())
        for m in micro_batches
        if m.routed_experts is not None
    )
    return {"router/replayed": known / max(1, sum(len(m.targets) for m in micro_batches))}
