"""Computes the products of a model's linear layers in bfloat16 on a CPU; everything between them stays in float32.

A product of factors that are rounded to bfloat16 is summed in float32 and rounded once:

    y = round(sum_i round(x_i) round(W_oi)) + bias        |y - exact| <= (3 u + O(u^2)) sum_i |x_i W_oi|,  u = 2^-8

and so are the two products of the backward pass. Weights, their gradients, norms, attention, activations, the output
head and logprobs are float32, so the compiled functions between the products (`fused.py`, `attention/tree.c`) read them
as they are. Autocast rounds those too, and takes torch's operators for them.
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
"""In the names of the two factors of a low-rank adapter, which stay in float32: they are small, and would gain nothing.
"""


def round_products(model: Any) -> None:
    """Compute the products of a model's decoder layers in bfloat16 from now on. `can_round` says of which models."""
    products = Products()
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if type(module) is nn.Linear and _ADAPTER not in name:
                round_linear(module, products)


def round_linear(module: nn.Linear, products: Products) -> None:
    """Compute one layer's products in bfloat16 from now on."""
    setattr(module, "forward", RoundedLinear(module, module.forward, products))  # noqa: B010 - mypy knows a method


def can_round(model: Any) -> bool:
    """Whether all matrices of the decoder layers are those of linear layers, whole, in float32, on a CPU. Of others,
    such as the experts of a mixture, products are called in other ways, which autocast knows."""
    layers = decoder_layers(model)
    linear_layers = [m for layer in layers for m in layer.modules() if type(m) is nn.Linear]
    theirs = {id(module.weight) for module in linear_layers}
    matrices = [p for layer in layers for p in layer.parameters() if p.ndim > 1]
    return bool(matrices) and all(
        id(p) in theirs and p.dtype == torch.float32 and p.device.type in ("cpu", "meta") for p in matrices
    )


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """A context in which a model's products are float32 again, forward and backward."""
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
    """What the layers of one model share."""

    def __init__(self) -> None:
        self.rounds = True
        """Whether products are in bfloat16."""
        self._input: Callable[[], Tensor | None] = lambda: None
        self._version = 0
        self._rounded: Tensor | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """`x` in bfloat16. Several layers in a row read the same tensor, and share what it is rounded to."""
        version = 0 if x.is_inference() else x._version
        if self._rounded is None or self._input() is not x or self._version != version:
            self._input, self._version = weakref.ref(x, self._forget), version
            self._rounded = x.detach().to(torch.bfloat16)
        return self._rounded

    def _forget(self, gone: object) -> None:
        if gone is self._input:
            self._rounded = None


@dataclass(frozen=True, eq=False)
class RoundedLinear:
    """The `forward` of one linear layer."""

    module: nn.Linear
    in_float32: Callable[[Tensor], Tensor]
    """The one that it had."""
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
