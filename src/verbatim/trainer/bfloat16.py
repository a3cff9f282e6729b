"""Computes the matrix products of linear layers in bfloat16 on a CPU; everything between them stays in float32.

Both factors are rounded to bfloat16, the product is summed in float32, and the result is rounded once:

    y = round(sum_i round(x_i) round(W_oi)) + bias        |y - exact| <= (3 u + O(u^2)) sum_i |x_i W_oi|,  u = 2^-8

The two products of the backward pass work the same way. Weights, their gradients, norms, attention, activations, the
output head and logprobs stay float32, so the compiled functions between the products (`fused.py`, `attention/tree.c`)
read them without a conversion. That is why this is not `torch.autocast`, which also rounds those tensors and dispatches
to torch's own operators.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verbatim.models.tiny import decoder_layers

_ADAPTER = "lora_"
"""Part of the names of an adapter's two factors, A and B. Both stay in float32, because they are too small to gain from
rounding."""


def round_products(model: Any) -> None:
    """Make a model's decoder layers compute their products in bfloat16. Only for models that `can_round` accepts."""
    products = Products()
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if type(module) is nn.Linear and _ADAPTER not in name:
                round_linear(module, products)


def round_linear(module: nn.Linear, products: Products) -> None:
    """Make one linear layer compute its products in bfloat16."""
    setattr(module, "forward", RoundedLinear(module, module.forward, products))  # noqa: B010 - mypy knows a method


def can_round(model: Any) -> bool:
    """True if every matrix in the decoder layers belongs to a linear layer and is unsharded, float32 and on a CPU.
    Matrices outside linear layers, such as those of a mixture of experts, are multiplied by operators that only
    autocast covers."""
    layers = decoder_layers(model)
    linear_layers = [m for layer in layers for m in layer.modules() if type(m) is nn.Linear]
    theirs = {id(module.weight) for module in linear_layers}
    matrices = [p for layer in layers for p in layer.parameters() if p.ndim > 1]
    return bool(matrices) and all(
        id(p) in theirs and p.dtype == torch.float32 and p.device.type in ("cpu", "meta") for p in matrices
    )


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Context manager that computes the model's products in float32, forward and backward."""
    forwards = (vars(module).get("forward") for module in model.modules())
    found = {id(f.products): f.products for f in forwards if isinstance(f, RoundedLinear)}.values()
    before = [products.rounds for products in found]
    for products in found:
        products.rounds = False
    try:
        yield
    finally:
        for products, rounded in zip(found, before, strict=True):
            products.rounds = rounded


class Products:
    """State shared by the rounded layers of one model: the switch, and the last input in bfloat16."""

    def __init__(self) -> None:
        self.rounds = True
        """True while products are computed in bfloat16."""
        self._input: Callable[[], Tensor | None] = lambda: None
        self._version = 0
        self._rounded: Tensor | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """`x` in bfloat16, cached: consecutive layers (query, key and value; gate and up) read the same tensor."""
        version = 0 if x.is_inference() else x._version  # an in-place change of the input makes the cached copy stale
        if self._rounded is None or self._input() is not x or self._version != version:
            # A weak reference: the copy is freed with its input, not kept until the next layer.
            self._input, self._version = weakref.ref(x, self._forget), version
            self._rounded = x.detach().to(torch.bfloat16)
        return self._rounded

    def _forget(self, gone: object) -> None:
        """Free the cached copy when its input is garbage-collected, unless a newer input has replaced it."""
        if gone is self._input:
            self._rounded = None


@dataclass(frozen=True, eq=False)
class RoundedLinear:
    """Replaces the `forward` of one linear layer."""

    module: nn.Linear
    in_float32: Callable[[Tensor], Tensor]
    """The layer's original `forward`."""
    products: Products

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        rounds = self.products.rounds and x.dtype == module.weight.dtype == torch.float32
        if not rounds or not x.numel() or torch.is_autocast_enabled(x.device.type):
            return self.in_float32(x)
        out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self.products.rounded(x), module.weight, module.bias
        )
        return out


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias` and its gradients. Legend: R rows, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # `x` is an argument only so that autograd sends the gradient to it; `rounded` holds its values.
        ctx.save_for_backward(rounded, weight_OI)
        out = linear(rounded, weight_OI.to(torch.bfloat16)).float()
        return out if bias_O is None else out.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
        rounded, weight_OI = ctx.saved_tensors
        grad_RO = grads[0].flatten(0, -2)
        rounded_RO = grad_RO.to(torch.bfloat16)
        grad_x = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            grad_x = (rounded_RO @ weight_OI.to(torch.bfloat16)).float().view_as(rounded)
        if ctx.needs_input_grad[2]:
            grad_weight_OI = (rounded_RO.T @ rounded.flatten(0, -2)).float()
        if ctx.needs_input_grad[3]:
            grad_bias_O = grad_RO.sum(0)
        return grad_x, None, grad_weight_OI, grad_bias_O
