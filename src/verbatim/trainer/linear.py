"""Makes linear layers call oneDNN, forward and backward, on CPUs where it is faster (`models/products.py`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verbatim.models.products import onednn_is_faster, onednn_product

ROW_MULTIPLE = 64
"""oneDNN builds a kernel for each new shape, which takes about a millisecond. Row counts are rounded up to a multiple
of this, so that shapes recur."""
LARGE = 1 << 29
"""Minimum multiply-adds that make a product worth building a kernel for, even if its number of rows does not recur."""


def use_onednn(model: nn.Module) -> None:
    """Make a model's linear layers call oneDNN, on machines where oneDNN is faster; results differ by rounding only.
    The choice depends on machine and model alone, so runs on one machine stay bit-for-bit reproducible."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def product(a_RI: Tensor, b_OI: Tensor) -> Tensor:
    """`a @ b.T` in the dtype that both have, without a graph. For shapes that recur (see `ROW_MULTIPLE`)."""
    if onednn_is_faster() and a_RI.dtype == torch.float32 and a_RI.device.type == "cpu":
        return onednn_product(a_RI, b_OI)
    with torch.autocast(a_RI.device.type, enabled=False):
        return a_RI @ b_OI.T


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    recurs = rows % ROW_MULTIPLE == 0 or rows * module.weight.numel() >= LARGE
    if rows == 0 or not recurs or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return linear(x, module.weight, module.bias)
    out: Tensor = _Linear.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias` and its gradients. Legend: R rows, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return onednn_product(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_RO, x_RI = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            grad_x = onednn_product(grad_RO, weight_OI.T).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight_OI = _product_of_columns(grad_RO, x_RI)
        if ctx.needs_input_grad[2]:
            grad_bias_O = grad_RO.sum(0)
        return grad_x, grad_weight_OI, grad_bias_O


def _product_of_columns(a_RA: Tensor, b_RB: Tensor) -> Tensor:
    """`a.T @ b`, [A, B]. oneDNN copies its first factor, so the narrower factor goes first."""
    if a_RA.shape[1] <= b_RB.shape[1]:
        return onednn_product(a_RA.T, b_RB.T)
    return onednn_product(b_RB.T, a_RA.T).T.contiguous()
