"""Chooses the attention plan for trees by device."""

from __future__ import annotations

import torch

from verbatim.core.types import Int32
from verbatim.models.attention import AttentionPlan
from verbatim.trainer.attention.flex import FlexPlan
from verbatim.trainer.attention.tree import TreePlan


def forest_plan(position_ids: Int32, ends: Int32, device: torch.device) -> AttentionPlan:
    """The attention plan of a forest in depth-first order: `FlexPlan` on CUDA, `TreePlan` elsewhere, because
    FlexAttention has a backward pass on CUDA only.

    Args:
        position_ids: Depth of each token: int32 [U].
        ends: End of each token's subtree: int32 [U].
        device: The device to compute on; on CUDA, U must be a multiple of `flex.BLOCK`.
    """
    plan = FlexPlan if device.type == "cuda" else TreePlan
    return plan(position_ids, ends, device)
