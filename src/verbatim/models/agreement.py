"""Whether another way to compute a model's layers computes the same, judged by what rounding is.

Layer by layer, the model's own code gets what the other way gets, in the model's numbers and in float64. The other way
is accepted where each of its layers is at most `TIMES` as far from float64 as the model's own, and where all of it is
what its layers are one after the other, between the embedding and the final norm. So nothing is compared that begins
with other numbers: a deep model makes their difference larger, by chance more or less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verbatim.models.attention import WholeSequencePlan
from verbatim.models.float64 import NoFloat32
from verbatim.models.head import CausalLM

TIMES = 8
"""As far from float64 as the model's own numbers; measured: at most 2.4, and 70,000 for a wrong head."""
_WORST = 32
"""...and a single row so many times more: one large number of it may be all that is rounded."""
_TIMES_ROUNDED = 2
"""Where both round the same inputs to bfloat16, which is most of the distance; measured: 1.13, a wrong head 8."""
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
        model: The model, of which each layer's first argument and result are the hidden states, [1, T, W].
        layer: The other way to compute a layer: its index and float32 [T, W] to [T, W], at positions 0 to T - 1.
        hidden: The whole of it: int64 [T] to the hidden states after the final norm, [T, W]; in the layers' own bits.
        length: T, the length of the sequence.
        rounds: The other way rounds inputs of products to bfloat16; the model's own numbers are rounded there too.
    """
    layers, plan = list(model.backbone.layers), WholeSequencePlan()
    positions = torch.arange(length, device=model.device)
    ids = (positions * 7919 + 1) % model.vocab_size
    ours: list[Tensor] = []
    own: list[Tensor] = []
    exact: list[Tensor] = []

    def compute(_: Any, args: Any) -> None:
        ours.append(layer(len(ours), args[0][0]))

    def keep(kept: list[Tensor], _: Any, args: Any, output: Tensor) -> Tensor:
        """The next layer gets what ours gives."""
        kept.append(output[0])
        return ours[len(kept) - 1].to(output.dtype)[None]

    is_float32 = model.output.weight.dtype == torch.float32
    with ExitStack() as hooks, nullcontext() if is_float32 else Precision(torch.float32, rounds=rounds):
        for module in layers:
            hooks.callback(module.register_forward_pre_hook(compute).remove)
            hooks.callback(module.register_forward_hook(partial(keep, own)).remove)
        own_end = model.hidden(ids, positions, plan)
    with ExitStack() as hooks, Precision(torch.float64):
        for module in layers:
            hooks.callback(module.register_forward_hook(partial(keep, exact)).remove)
        exact_end = model.hidden(ids, positions, plan)
    for index, numbers in enumerate(zip(ours, own, exact, strict=True)):
        found = beyond_rounding(*numbers, _TIMES_ROUNDED if rounds else TIMES)
        if found:
            return f"layer {index} (of 0 to {len(layers) - 1}) is {found}"
    found = beyond_rounding(hidden(ids), own_end, exact_end)
    return found and f"each layer agrees, but all of them together are {found}"


def beyond_rounding(ours: Tensor, own: Tensor, exact: Tensor, times: float = TIMES) -> str:
    """How far numbers are from those of float64, and how far the model's own are; "" where the difference is rounding.

    Args:
        ours: [..., W]; a row's distance is relative to the row.
        own: The same by the model's own code.
        exact: The same by the model's own code in float64.
        times: As far as the model's own numbers may ours be.
    """
    (typical, worst), (own_typical, own_worst) = _distances(ours, exact), _distances(own, exact)
    for found, theirs, most in ((typical, own_typical, times), (worst, own_worst, _WORST * times)):
        if not found <= most * theirs + FLOOR:  # so that what is no number is refused
            own_form = f"the model's own form is {theirs:.1e} away"
            return f"{found:.1e} away from its numbers in float64 (relative), and {own_form}"
    return ""


def _distances(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """The norm of a row's difference over the norm of the row: what three of four rows do not exceed, and the largest.

    Single rows may have one large number that is alone what is rounded: first tokens of pretrained models do.
    """
    off = ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-300)).flatten()
    return float(off.quantile(0.75)), float(off.max())


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
        self._memory = torch.empty(0, device="cpu")  # replaced where the weights are

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
