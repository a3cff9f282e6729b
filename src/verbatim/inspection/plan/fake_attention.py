"""Defines attention plans for steps on fake tensors. They compute nothing, but allocate the same memory as
FlexAttention on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim.models.attention import AttentionCall, AttentionPlan
from verbatim.trainer.attention.rows import RowsPlan
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.parallel.sequence import SequencePlan


class FlexMemory:
    """An `AttentionPlan` with the same inputs, outputs and saved tensors as `FlexPlan`, but without values."""

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """Return a tensor with the shape of the attention output, [1, U, H, E]."""
        inputs = (x.to(value_BKTD.dtype).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
        out: Tensor = _Flex.apply(*inputs)  # type: ignore[no-untyped-call]
        if call.sinks_H is not None:
            out = out * torch.sigmoid(call.sinks_H[:, None, None]).to(out.dtype)
        return out.transpose(1, 2)


class _Flex(torch.autograd.Function):
    """Saves the queries, keys, values, output and one float32 per query for the backward pass, which returns a gradient
    for each input."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        gradients = tuple(torch.empty_like(x) for x in (query, key, value))
        del delta
        return gradients


def as_on_cuda(plan: AttentionPlan) -> AttentionPlan:
    """Replace those parts of an attention plan for a CPU that allocate different memory on CUDA."""
    if isinstance(plan, TreePlan):
        return FlexMemory()
    if isinstance(plan, SequencePlan):
        plan.whole = as_on_cuda(plan.whole)
    if isinstance(plan, RowsPlan):
        vars(plan)["_forest"] = FlexMemory()
    return plan
