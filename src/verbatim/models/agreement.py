"""Whether another way to compute a model's layers computes the same, judged by what rounding is.

Each layer gets what the model's own layer gets, and both results are compared with that of the model's own code in
float64. The other way is accepted where it is at most `TIMES` as far from that as the model's own; end to end likewise.
A deep model makes rounding larger, in both alike; a layer that computes something else is thousands of times as far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verbatim.models.attention import WholeSequencePlan
from verbatim.models.float64 import NoFloat32
from verbatim.models.head import CausalLM

TIMES = 8
"""As far from float64 as the model's own numbers."""
FLOOR = 2.0**-23
"""Relative; own numbers may be nearer to float64 than those of another order of operations ever are."""
TOKENS = 28
"""Of the sequence that is computed: more than a page of the kernel, and than most of the tests' sliding windows."""
_AT_ONCE = 1 << 18
"""Weights that exist in float64 at one time, which stay in a processor's cache."""


def disagreement(
    model: CausalLM,
    layer: Callable[[int, Tensor], Tensor],
    hidden: Callable[[Tensor], Tensor],
    *,
    length: int,
    rounds: bool = False,
) -> str:
    """What a model's layers computed in another way do that rounding does not; "" where there is nothing.

    Of a model in bfloat16, its own numbers are those of its weights in float32.

    Args:
        model: The model, of which each layer's first argument is the hidden states, [1, T, W].
        layer: The other way to compute a layer: its index and float32 [T, W] to [T, W], at positions 0 to T - 1.
        hidden: The whole of it: int64 [T] to the hidden states after the final norm, [T, W].
        length: T, the length of the sequence.
        rounds: The other way rounds inputs of products to bfloat16; the model's own numbers are rounded there too.
    """
    layers, plan = list(model.backbone.layers), WholeSequencePlan()
    positions = torch.arange(length, device=model.device)
    ids = (positions * 7919 + 1) % model.vocab_size
    inputs: list[Tensor] = []
    own: list[Tensor] = []
    exact: list[Tensor] = []

    def keep(_: Any, args: Any, output: Tensor) -> None:
        inputs.append(args[0][0])
        own.append(output[0])

    def add_own_input(_: Any, args: Any) -> Any:
        return torch.cat([args[0], inputs[len(exact)].double()[None]]), *args[1:]

    def take_it_out(_: Any, args: Any, output: Tensor) -> Tensor:
        exact.append(output[1])
        return output[:1]

    is_float32 = model.output.weight.dtype == torch.float32
    with ExitStack() as hooks, nullcontext() if is_float32 else Precision(torch.float32, rounds=rounds):
        for module in layers:
            hooks.callback(module.register_forward_hook(keep).remove)
        own_end = model.hidden(ids, positions, plan)
    with ExitStack() as hooks, Precision(torch.float64):
        for module in layers:
            hooks.callback(module.register_forward_pre_hook(add_own_input).remove)
            hooks.callback(module.register_forward_hook(take_it_out).remove)
        exact_end = model.hidden(ids, positions, plan)
    for index, given in enumerate(inputs):
        found = beyond_rounding(layer(index, given), own[index], exact[index])
        if found:
            return f"layer {index} (of 0 to {len(layers) - 1}) is {found}"
    found = beyond_rounding(hidden(ids), own_end, exact_end)
    return found and f"each layer agrees, but all of them together are {found}"


def beyond_rounding(ours: Tensor, own: Tensor, exact: Tensor) -> str:
    """How far numbers are from those of float64, and how far the model's own are; "" where the difference is rounding.

    Args:
        ours: [..., W]; a row's distance is relative to the row.
        own: The same by the model's own code.
        exact: The same by the model's own code in float64.
    """
    found, theirs = (_distance(x, exact) for x in (ours, own))
    if found <= TIMES * theirs + FLOOR:
        return ""
    return f"{found:.1e} away from its numbers in float64 (relative), and the model's own form is {theirs:.1e} away"


def _distance(found: Tensor, exact: Tensor) -> float:
    """The root mean square over all rows of the norm of a row's difference over the norm of the row."""
    off = (found.double() - exact).square().sum(-1) / exact.square().sum(-1).clamp_min(1e-300)
    return float(off.mean().sqrt())


class Precision(NoFloat32):
    """Computes a model in another number format than that of its weights, which stay as they are.

    Args:
        dtype: float64, or float32 for weights in bfloat16.
        rounds: Round inputs of products to bfloat16.
    """

    def __init__(self, dtype: torch.dtype, *, rounds: bool = False) -> None:
        super().__init__()
        self._dtype = dtype
        self._rounds = rounds
        self._memory = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._product(*args, **kwargs or {})
        if func is F.embedding:
            return func(*args, **kwargs or {}).to(self._dtype)
        return super().__torch_function__(func, types, args, kwargs)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._rounds:
            x = x.bfloat16()
        x = x.to(self._dtype)
        rows = max(1, _AT_ONCE // weight.shape[1])
        if self._memory.numel() < rows * weight.shape[1]:
            self._memory = torch.empty(rows * weight.shape[1], dtype=self._dtype, device=weight.device)
        parts = []
        for part in torch.split(weight, rows):
            wide = self._memory[: part.numel()].view(part.shape).copy_(part)
            parts.append(F.linear(x, wide))
        out = torch.cat(parts, dim=-1)
        return out if bias is None else out + bias.to(self._dtype)
