"""Two parts of a model whose products are rounded to bfloat16 (`bfloat16.py`): feed-forward layers and the output head.

Between the products of a gated feed-forward layer, every number is rounded to bfloat16 before it is read again. So
these numbers stay in bfloat16, in half the memory and without conversions; the C functions compute in float32 between
reading and writing. The result is the same, bit for bit, as with a conversion after each product.

The output head computes logits in float32, and only the two products of its backward pass are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verbatim.models import native
from verbatim.trainer import fused
from verbatim.trainer.bfloat16 import MergedLinear, Products, RoundedLinear, products_of

_PER_LAYER = 4
"""Number of arguments for each linear layer: weight, A, B and scale; the last three are None without an adapter."""


def round_parts(model: Any) -> None:
    """Make the feed-forward layers and the head of a model that `round_products` changed use the functions here. Layers
    that have biases, or that no C function computes, stay as they are."""
    products = products_of(model)
    if products is None:
        return
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, partial) and own.func is fused.feed_forward and _fits(module):
            setattr(module, "forward", RoundedFeedForward(module, own, products))  # noqa: B010 - mypy knows a method
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype == torch.float32 and head.weight.device.type == "cpu":
        setattr(head, "forward", RoundedHead(head, head.forward, products))  # noqa: B010


def _projections(module: Any) -> list[Any]:
    return [module.gate_proj, module.up_proj, module.down_proj]


def _fits(module: Any) -> bool:
    """True if all three layers are rounded, and none has a bias."""
    layers = _projections(module)
    rounded = all(isinstance(vars(layer).get("forward"), RoundedLinear | MergedLinear) for layer in layers)
    return rounded and all(_base(layer).bias is None for layer in layers) and native.library(fused.SOURCE) is not None


def _base(layer: Any) -> nn.Linear:
    found: nn.Linear = layer if type(layer) is nn.Linear else layer.base_layer
    return found


@dataclass(frozen=True, eq=False)
class RoundedFeedForward:
    """Replaces the `forward` of one gated feed-forward layer."""

    module: Any
    own: Callable[[Tensor], Tensor]
    """The `forward` that computes each product on its own."""
    products: Products

    def __call__(self, x: Tensor) -> Tensor:
        layers = _projections(self.module)
        given = [argument for layer in layers for argument in _arguments(layer)]
        weights = [_base(layer).weight for layer in layers]
        fits = fused.suits(x, *weights) and not any(size % fused.MULTIPLE for w in weights for size in w.shape)
        if not self.products.rounds or not fits or not x.numel():
            return self.own(x)
        out: Tensor = _FeedForward.apply(x, self.products.rounded(x), *given)  # type: ignore[no-untyped-call]
        return out


def _arguments(layer: Any) -> tuple[Tensor, Tensor | None, Tensor | None, float | None]:
    """The weight of a linear layer, with A, B and scale of its adapter."""
    if type(layer) is nn.Linear or layer.disable_adapters:
        return _base(layer).weight, None, None, None
    (name,) = layer.active_adapters
    return layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def rounded_weight(weight_OI: Tensor, a_KI: Tensor | None, b_OK: Tensor | None, scale: float | None) -> Tensor:
    """The weight with its adapter merged, in bfloat16. It is computed in each pass: a kept copy could be older than the
    weights."""
    if a_KI is None or b_OK is None or scale is None:
        return weight_OI.to(torch.bfloat16)
    return torch.addmm(weight_OI, b_OK, a_KI, alpha=scale).to(torch.bfloat16)


class _FeedForward(torch.autograd.Function):
    """`down(silu(gate(x)) * up(x))` and its gradients. Legend: R rows, I width, J inner width, K rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, *given: Any) -> Tensor:
        gate_w, up_w, down_w = (rounded_weight(*each) for each in _by_layer(given))
        gate, up = linear(rounded, gate_w), linear(rounded, up_w)
        inner = torch.empty_like(gate)
        fused.call("swiglu_forward_half", gate.numel(), gate, up, inner)
        ctx.scales = given[3::_PER_LAYER]
        ctx.merged = [scale is not None for scale in ctx.scales]
        # A merged weight is kept for the backward pass; one without an adapter is rounded there again.
        kept = [w for w, merged in zip((gate_w, up_w, down_w), ctx.merged, strict=True) if merged]
        tensors = [None if isinstance(x, float) else x for x in given]
        ctx.save_for_backward(rounded, gate, up, inner, *tensors, *kept)
        return linear(inner, down_w).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rounded, gate, up, inner, *rest = ctx.saved_tensors
        given, kept = rest[: 3 * _PER_LAYER], iter(rest[3 * _PER_LAYER :])
        given[3::_PER_LAYER] = ctx.scales
        layers = _by_layer(given)
        gate_w, up_w, down_w = (
            next(kept) if merged else rounded_weight(*layer) for merged, layer in zip(ctx.merged, layers, strict=True)
        )
        grad_RI = grads[0].flatten(0, -2).to(torch.bfloat16)
        x_RI, inner_RJ = rounded.flatten(0, -2), inner.flatten(0, -2)
        grad_inner = grad_RI @ down_w
        grad_gate, grad_up = torch.empty_like(grad_inner), torch.empty_like(grad_inner)
        fused.call("swiglu_backward_half", grad_inner.numel(), gate, up, grad_inner, grad_gate, grad_up)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_gate @ gate_w).float().add_(grad_up @ up_w).view_as(rounded)
        found: list[Tensor | None] = []
        for number, (x, grad) in enumerate(((x_RI, grad_gate), (x_RI, grad_up), (inner_RJ, grad_RI))):
            needed = ctx.needs_input_grad[2 + number * _PER_LAYER :][:_PER_LAYER]
            found += parameter_gradients(x, grad, layers[number], needed)
        return grad_x, None, *found


def _by_layer(given: Sequence[Any]) -> list[tuple[Any, Any, Any, Any]]:
    return [tuple(given[i : i + _PER_LAYER]) for i in range(0, 3 * _PER_LAYER, _PER_LAYER)]


def parameter_gradients(
    x_RI: Tensor, grad_RO: Tensor, layer: tuple[Any, Any, Any, Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of weight, A, B (float32) and scale (None), from a layer's rounded input and output gradient.

    dL/dB = scale g^T (x A^T)          dL/dA = scale (g B)^T x
    """
    _, a_KI, b_OK, scale = layer
    weight = (grad_RO.T @ x_RI).float() if needed[0] else None
    a = b = None
    # The small matrix is the first factor: it is the one that oneDNN copies into another order.
    if needed[1]:
        a = ((grad_RO @ b_OK.to(torch.bfloat16)).T.contiguous() @ x_RI).float().mul_(scale)
    if needed[2]:
        b = ((x_RI @ a_KI.to(torch.bfloat16).T).T.contiguous() @ grad_RO).T.float().mul_(scale)
    return [weight, a, b, None]


@dataclass(frozen=True, eq=False)
class RoundedHead:
    """Replaces the `forward` of the output head."""

    module: nn.Linear
    own: Callable[[Tensor], Tensor]
    """The head's original `forward`, in float32."""
    products: Products

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        fits = fused.suits(x, module.weight) and x.dim() == 2 and x.numel() > 0
        if not self.products.rounds or not fits or not torch.is_grad_enabled():
            return self.own(x)
        out: Tensor = _HeadProduct.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
        return out


class _HeadProduct(torch.autograd.Function):
    """`x @ weight.T + bias` in float32, with the products of the gradients rounded. Legend: M targets, V vocabulary."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MD, weight_VD)
        return linear(x_MD, weight_VD, bias_V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_MD, weight_VD = ctx.saved_tensors
        grad_MV = grads[0].to(torch.bfloat16)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_MV @ weight_VD.to(torch.bfloat16)).float()
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_MV.T @ x_MD.to(torch.bfloat16)).float()
        if ctx.needs_input_grad[2]:
            grad_bias = grads[0].sum(0)
        return grad_x, grad_weight, grad_bias
