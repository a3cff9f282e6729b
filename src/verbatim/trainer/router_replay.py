"""Checks recorded experts before they are replayed in the trainer, and counts the targets that have them.

"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370) calls it rollout
routing replay: sampler and trainer compute the same logits up to rounding, but where two experts are almost tied,
rounding decides which one computes a token, and its logprob changes by much more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.errors import UsageError
from verbatim.models.experts import Routers
from verbatim.types import MicroBatch, TrainingSample


def check_experts(samples: Sequence[TrainingSample], routers: Routers | None, name: str) -> None:
    """Refuse recorded experts that are not those of this model.

    Args:
        samples: Of a batch.
        routers: Of the model in training; None = it has none that can be told what to choose.
        name: The model's class.

    Raises:
        UsageError: they are of another model.
    """
    routed = [sample.routed_experts.experts for sample in samples if sample.routed_experts is not None]
    if not routed:
        return
    if routers is None:
        raise UsageError(f"the samples have recorded experts, but {name} has no routers that can be told what to "
                         "choose; set inference.return_routed_experts = false")  # fmt: skip
    if routers.limits_groups:
        raise UsageError(f'recorded experts cannot be replayed in {name} with topk_method = "group_limited_greedy": '
                         "experts outside of the groups that its routers choose themselves have the weight 0; set "
                         "inference.return_routed_experts = false")  # fmt: skip
    for experts in routed:
        if experts.shape[1] != routers.num_layers or (experts.size and experts.max() >= routers.num_experts):
            raise UsageError(
                f"recorded experts are of {experts.shape[1]} layers with at least {int(experts.max(initial=0)) + 1} "
                f"experts, but {name} has {routers.num_layers} layers with {routers.num_experts} experts; they were "
                "sampled from another model"
            )


def replayed_share(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """`router/replayed`: of the targets, the share whose token before them is computed by recorded experts. Nothing
    where no experts are recorded at all."""
    if all(micro_batch.routed_experts is None for micro_batch in micro_batches):
        return {}
    known = sum(
        int(m.routed_experts.known[m.targets.source_positions].sum()) for m in micro_batches
        if m.routed_experts is not None
    )  # fmt: skip
    return {"router/replayed": known / max(1, sum(len(m.targets) for m in micro_batches))}
