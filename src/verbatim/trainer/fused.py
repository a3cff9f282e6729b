"""Fuses the norms, gated activations and rotary embeddings of a decoder layer into one C function each (`layers.c`).

`transformers` computes a norm with six operations and a rotary embedding with five. Each operation reads and writes all
activations, and the backward pass doubles the number of operations. Here each norm and each rotary embedding is a
single pass, for classes known to compute

    weight * x / sqrt(mean(x^2) + eps)      down(silu(gate(x)) * up(x))      x cos + rotate_half(x) sin

in float32 on a CPU. Everything else runs as in `transformers`.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from verbatim.core.machine_faults import is_out_of_memory
from verbatim.models import native
from verbatim.models.agreement import Precision, beyond_rounding
from verbatim.models.refusal import describe

logger = logging.getLogger(__name__)

SOURCE = native.CSource.read(Path(__file__).with_name("layers.c"))
KNOWN = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Model families whose norms, feed-forward layers and rotary embeddings follow the formulas above."""
MULTIPLE = 16
"""Sizes must be a multiple of this: the C functions work on vectors of 16 floats, without a remainder loop."""
PARTS = 16
"""Number of partial sums for the gradient of a norm's weight, divided among the threads. It is fixed, so the result
does not depend on the number of threads."""
_ROTATE = "apply_rotary_pos_emb"
_SMALL = 2 * MULTIPLE
"""Layer size used to compare the C functions with `transformers`."""
_ROWS = 16
"""Number of tokens used to compare the C functions with `transformers`."""
_Numbers: TypeAlias = Iterator[tuple[Tensor, Tensor, Tensor]]
"""The results of the C function, of `transformers`, and of `transformers` in float64, for the same input."""
_compared: dict[Any, str] = {}
"""The difference found for each class or function that has been compared; "" if it agrees with `transformers`."""


def fuse_layers(model: nn.Module) -> list[str]:
    """Make a model's known norms, feed-forward layers and rotary embeddings call the C functions, if these could be
    compiled on this machine. Results differ by rounding only.

    Returns the parts that compute something else in the installed `transformers`. These parts stay unchanged, and a
    warning is logged.
    """
    if native.library(SOURCE) is None:
        return []
    differing: set[str] = set()

    def agrees(compare: Callable[..., _Numbers], part: Callable[..., Any], *given: Any) -> bool:
        found = _disagreement(compare, part, *given)
        differing.update([found] if found else [])
        return not found

    for module in model.modules():
        name, home = type(module).__name__, type(module).__module__
        # The module path must match exactly: a subclass elsewhere, or a user's class of the same name, may compute
        # something else.
        family = next((f for f in KNOWN if home == f"transformers.models.{f.lower()}.modeling_{f.lower()}"), None)
        if family is None or "forward" in vars(module):
            continue
        kind = name.removeprefix(family)
        if kind == "RMSNorm" and agrees(_norms, type(module)):
            module.forward = partial(_norm, module, module.forward)
        elif kind == "MLP" and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation"):
            if agrees(_feed_forwards, type(module), module.config):
                module.forward = partial(feed_forward, module)
        elif kind == "Attention":
            home_of = sys.modules[home]
            given = getattr(home_of, _ROTATE)
            # The function is replaced in its module, because layers call a module-level function. This affects all
            # models of the process.
            if not hasattr(given, "__wrapped__") and agrees(_rotations, given):
                setattr(home_of, _ROTATE, _rotating(given))
    return sorted(differing)


def _disagreement(compare: Callable[..., _Numbers], part: Callable[..., Any], *given: Any) -> str:
    """How the C function differs from a part of `transformers` on a small random input; "" if they differ by rounding
    only.

    `transformers` may change a formula in any version, and class names alone would not show the change.
    """
    if isinstance(torch.empty(0, device="cpu"), FakeTensor):  # under FakeTensorMode there are no values to compare
        return ""
    if part not in _compared:
        with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            try:
                found = next(filter(None, (beyond_rounding(*three) for three in compare(part, *given))), "")
            except (RuntimeError, TypeError, AttributeError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                found = f"could not be compared ({describe(error)})"
        _compared[part] = found and f"{part.__qualname__} of this transformers: its compiled form is {found}"
        if found:
            logger.warning("%s; it runs unfused, and a training step takes up to 1.6 times as long", _compared[part])
    return _compared[part]


def _norms(kind: type[Any]) -> _Numbers:
    norm = kind(_SMALL, eps=0.01).float()
    norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(_ROWS, _SMALL, dtype=torch.float32, device="cpu")
    yield _norm(norm, norm.forward, x), norm(x), _exact(norm, x)


def _feed_forwards(kind: type[Any], config: Any) -> _Numbers:
    small = copy.copy(config)
    small.hidden_size = small.intermediate_size = _SMALL
    part = kind(small).float()
    x = torch.randn(1, _ROWS, _SMALL, dtype=torch.float32, device="cpu")
    yield feed_forward(part, x), part(x), _exact(part, x)


def _rotations(rotate: Callable[..., tuple[Tensor, Tensor]]) -> _Numbers:
    q, k = (torch.randn(1, heads, _ROWS, _SMALL, dtype=torch.float32, device="cpu") for heads in (2, 1))
    half = torch.randn(1, _ROWS, _SMALL // 2, dtype=torch.float32, device="cpu")
    angles = half.repeat(1, 1, 2)  # both halves of a head rotate by the same angles
    tables = angles.cos(), angles.sin()
    yield from zip(_rotating(rotate)(q, k, *tables), rotate(q, k, *tables), _exact(rotate, q, k, *tables), strict=True)


def _exact(part: Callable[..., Any], *inputs: Tensor) -> Any:
    with Precision(torch.float64):
        return part(*(x.double() for x in inputs))


def suits(*tensors: Tensor) -> bool:
    """True if the C functions can read these tensors: float32, on a CPU, outside autocast. Fake tensors count too, so
    that a memory plan measures the same path; `call` then computes nothing."""
    return not torch.is_autocast_enabled("cpu") and all(
        type(x) in (Tensor, nn.Parameter, FakeTensor) and x.dtype == torch.float32 and x.device.type == "cpu"
        for x in tensors
    )


def _norm(module: Any, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not suits(x, module.weight) or x.shape[-1] % MULTIPLE or not x.numel():
        return own(x)
    out: Tensor = _Norm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def feed_forward(module: Any, x: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`; the `forward` of known feed-forward layers."""
    gate, up = module.gate_proj(x), module.up_proj(x)
    if not suits(gate, up) or gate.shape[-1] % MULTIPLE or not gate.numel():
        out: Tensor = module.down_proj(module.act_fn(gate) * up)
        return out
    out = module.down_proj(_Gated.apply(gate, up))  # type: ignore[no-untyped-call]
    return out


def _rotating(given: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap a `transformers` module's `apply_rotary_pos_emb`: queries and keys are [1, heads, T, D], cos and sin
    [1, T, D]. Calls of any other form go to the original."""

    @wraps(given)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        plain = not rest and not named and q.dim() == 4 and q.shape[0] == 1 and cos.shape == (1, *q.shape[2:])
        if not plain or not suits(q, k, cos, sin) or cos.requires_grad or not q.numel():
            return given(q, k, cos, sin, *rest, **named)
        tables = cos[0].contiguous(), sin[0].contiguous()
        turned = [_Rotated.apply(x[0].transpose(0, 1), *tables) for x in (q, k)]  # type: ignore[no-untyped-call]
        return turned[0].transpose(0, 1)[None], turned[1].transpose(0, 1)[None]

    return rotate


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        out, scales = torch.empty_like(x), x.new_empty(rows)
        call("norm_forward", rows, size, ctypes.c_float(eps), x, weight, out, scales)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        size = x.shape[-1]
        grad_x, grad_weights = torch.empty_like(x), x.new_empty(PARTS, size)
        call("norm_backward", len(scales), size, PARTS, x, weight, scales, grads[0].contiguous(), grad_x, grad_weights)
        return grad_x, grad_weights.sum(0), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        call("swiglu_forward", gate.numel(), gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        call("swiglu_backward", gate.numel(), gate, up, grads[0].contiguous(), grad_gate, grad_up)
        return grad_gate, grad_up


class _Rotated(torch.autograd.Function):
    """Applies rotary embeddings to [T, heads, D]. The backward pass is the inverse rotation (`direction` -1)."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _rotated(x_THD, cos_TD, sin_TD, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotated(grads[0], cos_TD, sin_TD, -1.0), None, None


def _rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, direction: float) -> Tensor:
    x_THD = x_THD.contiguous()
    out = torch.empty_like(x_THD)
    call("rotate", *x_THD.shape, ctypes.c_float(direction), x_THD, cos_TD, sin_TD, out)
    return out


def call(name: str, *inputs: Any) -> None:
    """Call a C function: ints are passed as int64, tensors as pointers. With fake tensors, which have no data, nothing
    is called."""
    if any(isinstance(x, FakeTensor) for x in inputs):
        return
    given = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int64(x) if isinstance(x, int) else x
        for x in inputs
    ]
    getattr(native.library(SOURCE), name)(*given)
