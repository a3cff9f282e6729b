"""Checks that another implementation of a model's layers agrees with the model's own code up to rounding.

Each layer of the model's own code gets the same input as the other implementation's layer, once in the model's dtype
and once in float64. The other implementation passes if the error of each of its layers against float64 is at most
`TIMES` times the error of the model's own code, and if its full forward pass agrees within the same limit with its own
layers run one by one. Layers are compared on equal inputs because a deep model amplifies an early rounding difference
by an unpredictable factor.
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
"""Maximum accepted error, as a multiple of the error of the model's own code. In measurements, a correct implementation
had at most 2.4 times the error of the model's own code, and an implementation with a wrong head 70,000 times."""
_WORST = 32
"""The limit for the worst row is this many times the limit for the 75th percentile of the rows, because the worst row's
error may come from a single large number."""
_TIMES_ROUNDED = 2
"""Used instead of `TIMES` if both implementations round the same inputs to bfloat16. This rounding dominates both
errors, so the limit can be tight. In measurements, a correct implementation had 1.13 times the error of the model's own
code, and an implementation with a wrong head 8 times."""
FLOOR = 2.0**-23
"""Relative error that is always accepted (float32's epsilon), because the model's own code may by chance be closer to
float64 than any other order of operations."""
TOKENS = 28
"""Length of the test sequence: longer than a page of the kernel, and longer than most sliding windows in the tests."""
_AT_ONCE = 1 << 18
"""Number of weights converted to float64 at a time, so that they stay in the processor's cache."""


def disagreement(
    model: CausalLM,
    layer: Callable[[int, Tensor], Tensor],
    hidden: Callable[[Tensor], Tensor],
    *,
    length: int,
    rounds: bool = False,
) -> str:
    """Describe where another implementation of a model's layers first differs by more than rounding; "" if nowhere.

    The weights of a bfloat16 model are first widened to float32.

    Args:
        model: The model. Each of its layers takes hidden states, [1, T, W], as its first argument, and returns hidden
            states, [1, T, W].
        layer: The other implementation of one layer. It maps the layer's index and its input, float32 [T, W] at
            positions 0 to T - 1, to its output, [T, W].
        hidden: The other implementation of the whole backbone. It maps ids, int64 [T], to the hidden states after the
            final norm, [T, W].
        length: T, the length of the sequence.
        rounds: True if the other implementation rounds the inputs of matrix products to bfloat16. In the model's own
            code, the inputs of matrix products are then rounded too.
    """
    layers, plan = list(model.backbone.layers), WholeSequencePlan()
    positions = torch.arange(length, device=model.device)
    ids = (positions * 7919 + 1) % model.vocab_size  # a large prime: neighbouring ids are far apart
    ours: list[Tensor] = []
    own: list[Tensor] = []
    exact: list[Tensor] = []

    def compute(_: Any, args: Any) -> None:
        ours.append(layer(len(ours), args[0][0]))

    def keep(kept: list[Tensor], _: Any, args: Any, output: Tensor) -> Tensor:
        """Record the output of the model's own layer, but return the other implementation's output, so that the next
        layer gets the same input in all passes."""
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
    """Describe the errors of both implementations; "" if the error of `ours` is within rounding.

    Args:
        ours: Results of the other implementation, [..., W]. Errors are relative to the norm of each row.
        own: Results of the model's own code, [..., W].
        exact: Results of the model's own code in float64, [..., W].
        times: Maximum accepted error of `ours`, as a multiple of the error of `own`.
    """
    (typical, worst), (own_typical, own_worst) = _distances(ours, exact), _distances(own, exact)
    for found, theirs, most in ((typical, own_typical, times), (worst, own_worst, _WORST * times)):
        if not found <= most * theirs + FLOOR:  # "not <=" rather than ">", so that NaN counts as an error
            own_form = f"the model's own form is {theirs:.1e} away"
            return f"{found:.1e} away from its numbers in float64 (relative), and {own_form}"
    return ""


def _distances(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """The 75th percentile and the maximum over rows of the relative error: the norm of the difference, divided by the
    norm of the row.

    The two have separate limits, because a single row may be dominated by one large number, whose rounding is then the
    whole error. Pretrained models have such rows at the first tokens.
    """
    off = ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-300)).flatten()
    return float(off.quantile(0.75)), float(off.max())


class Precision(NoFloat32):
    """Computes a model in a dtype that differs from the dtype of its weights. The weights are not changed.

    Args:
        dtype: float64, or float32 for weights in bfloat16.
        rounds: Round the inputs of matrix products to bfloat16.
    """

    def __init__(self, dtype: torch.dtype, *, rounds: bool = False) -> None:
        super().__init__()
        self._dtype = dtype
        self._rounds = rounds
        self._memory = torch.empty(0, device="cpu")  # scratch; moved to the weights' device at first use

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
