"""Computes the matrix products of linear layers in bfloat16 on a CPU; everything between them stays in float32.

Both factors are rounded to bfloat16, the product is summed in float32, and the result is rounded once:

    y = round(sum_i round(x_i) round(W_oi)) + bias        |y - exact| <= (3 u + O(u^2)) sum_i |x_i W_oi|,  u = 2^-8

The two products of the backward pass work the same way. Weights, their gradients, norms, attention, activations, the
output head and logprobs stay float32, so the compiled functions between the products (`fused.py`, `attention/tree.c`)
read them without a conversion. That is why this is not `torch.autocast`, which also rounds those tensors and dispatches
to torch's own operators.

A layer with an adapter multiplies by its merged weight, as the sampler does, and so needs one large product instead of
three products and two sums:

    y = round(sum_i round(x_i) round((W + scale B A)_oi)) + bias
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
"""Part of the names of an adapter's two factors, A and B."""
_ADAPTED = ("peft.tuners.lora.layer", "Linear")
"""Module and name of the class of `peft` that adds an adapter to a linear layer."""


def round_products(model: Any) -> None:
    """Make a model's decoder layers compute their products in bfloat16. Only for models that `can_round` accepts."""
    products = Products()
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if type(module) is nn.Linear and _ADAPTER not in name:
                round_linear(module, products)
            elif (type(module).__module__, type(module).__name__) == _ADAPTED:
                setattr(module, "forward", MergedLinear(module, module.forward, products))  # noqa: B010


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


def is_rounded(model: nn.Module) -> bool:
    """True if `round_products` changed this model."""
    return products_of(model) is not None


def rounds_now(model: nn.Module) -> bool:
    """True if `round_products` changed this model, outside `in_float32`."""
    products = products_of(model)
    return products is not None and products.rounds


def products_of(model: nn.Module) -> Products | None:
    """The state of a model's rounded layers; None if `round_products` has not changed the model."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((forward.products for forward in forwards if isinstance(forward, RoundedLinear)), None)


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


@dataclass(frozen=True, eq=False)
class MergedLinear:
    """Replaces the `forward` of one linear layer with an adapter."""

    module: Any
    own: Callable[[Tensor], Tensor]
    """The layer's original `forward`. It computes layers without their adapter, and everything in float32."""
    products: Products

    def __call__(self, x: Tensor) -> Tensor:
        module, base = self.module, self.module.base_layer
        rounds = self.products.rounds and x.dtype == base.weight.dtype == torch.float32
        if not rounds or not x.numel() or module.disable_adapters or torch.is_autocast_enabled(x.device.type):
            return self.own(x)
        (name,) = module.active_adapters
        out: Tensor = _MergedProduct.apply(  # type: ignore[no-untyped-call]
            x,
            self.products.rounded(x),
            base.weight,
            base.bias,
            module.lora_A[name].weight,
            module.lora_B[name].weight,
            module.scaling[name],
        )
        return out


class _MergedProduct(torch.autograd.Function):
    """`x @ (weight + scale * b @ a).T + bias`, and the gradients of `x`, `a` and `b`; weight and bias are frozen.

    Legend: R rows, I inputs, O outputs, K rank of the adapter. With g = dL/dy, rounded like all factors:

        dL/db = scale g^T (x a^T)          dL/da = scale (g b)^T x
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rounded: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_KI: Tensor,
        b_OK: Tensor,
        scale: float,
    ) -> Tensor:
        # The weight is merged in each forward pass: a kept copy could be older than A and B.
        merged_OI = torch.addmm(weight_OI, b_OK, a_KI, alpha=scale).to(torch.bfloat16)
        ctx.save_for_backward(rounded, merged_OI, a_KI, b_OK)
        ctx.scale = scale
        out = linear(rounded, merged_OI).float()
        return out if bias_O is None else out.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rounded, merged_OI, a_KI, b_OK = ctx.saved_tensors
        x_RI, grad_RO = rounded.flatten(0, -2), grads[0].flatten(0, -2).to(torch.bfloat16)
        grad_x = grad_a_KI = grad_b_OK = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_RO @ merged_OI).float().view_as(rounded)
        # The small matrix is the first factor: it is the one that oneDNN copies into another order.
        if ctx.needs_input_grad[4]:
            back_RK = grad_RO @ b_OK.to(torch.bfloat16)
            grad_a_KI = (back_RK.T.contiguous() @ x_RI).float().mul_(ctx.scale)
        if ctx.needs_input_grad[5]:
            low_RK = x_RI @ a_KI.to(torch.bfloat16).T
            grad_b_OK = (low_RK.T.contiguous() @ grad_RO).T.float().mul_(ctx.scale)
        return grad_x, None, None, None, grad_a_KI, grad_b_OK, None
