"""Keeps a float64 model in float64 throughout.

`transformers` computes every RMSNorm, and the softmax of most routers, in float32 regardless of the model's dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from verbatim.core.errors import ModelError
from verbatim.models.experts import router_modules


def keep_float64(model: nn.Module) -> None:
    """Make a float64 model compute its RMSNorms and routers in float64, so that tests can compare to 1e-12.

    Raises:
        ModelError: a norm computes something other than `weight * x / sqrt(mean(x^2) + eps)`.
    """
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if eps is not None and weight is not None:
            probe = torch.linspace(-1, 2, weight.shape[-1], dtype=weight.dtype, device=weight.device)
            with torch.no_grad():
                own = torch.linspace(0.5, 2, weight.shape[-1], dtype=weight.dtype, device=weight.device)
                found = functional_call(module, {"weight": own}, (probe,))  # the norm's own weight may be sharded
                same = torch.allclose(_rms_norm(own, eps, probe), found, rtol=0, atol=1e-5)
            if same:
                module.forward = partial(_normalize, module, eps)
                continue
        raise ModelError(f"{name} ({type(module).__name__}) is a norm without a float64 version here; train in float32")
    routers = router_modules(model)
    for router in routers:
        router.forward = partial(_in_float64, router.forward)
    if routers and model._can_set_experts_implementation():  # type: ignore[operator]
        model.set_experts_implementation("eager")  # type: ignore[operator]  # the fused kernel lacks float64


def _normalize(module: nn.Module, eps: float, x: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]  # looked up: sharding replaces the parameter
    return _rms_norm(weight, eps, x)


def _rms_norm(weight: Tensor, eps: float, x: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _in_float64(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with NoFloat32():
        return forward(*args, **kwargs)


class NoFloat32(TorchFunctionMode):
    """Turns conversions from float64 to float32 into no-ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func in (Tensor.to, Tensor.type) and torch.float32 in args[1:]):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
