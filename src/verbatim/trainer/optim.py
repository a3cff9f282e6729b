"""Builds AdamW over a model's parameters, computes its learning rates, saves and loads its state as safetensors."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verbatim.config.schema import OptimConfig
from verbatim.errors import CheckpointError
from verbatim.machine_faults import rust_errors_as_oserror

_STATE = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW whose weight decay leaves out norms, biases and every other one-dimensional parameter."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel instead of a dozen, on CPU and CUDA alike
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr,
                             betas=(config.beta1, config.beta2), eps=config.eps, fused=True)  # fmt: skip


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of an optimizer step; 0 is the first of `total_steps`.

    A straight line from 0 before the first optimizer step to the peak at number `warmup_steps`, then the schedule,
    which reaches `min_lr_ratio` as the last one is done: at `step = total_steps`. So none is taken at a rate of 0.

    Example: `total_steps = 6`, `warmup_steps = 1`, linear to 0: 0.5, 1, 0.8, 0.6, 0.4, 0.2 of the peak.
    """
    assert 0 <= step <= total_steps, f"optimizer step {step} of {total_steps}"
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * ((step + 1) / (warmup + 1))
    if config.schedule == "constant":
        return config.lr
    progress = (step - warmup) / max(1, total_steps - warmup)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def save_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Write the state of every parameter that has one, as `{parameter}/{step, exp_avg, exp_avg_sq}`."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value.detach().cpu().contiguous()
    with rust_errors_as_oserror(path):
        save_file(tensors, path)


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Read what `save_optimizer` wrote, into an optimizer that is then bit for bit the same.

    Raises:
        CheckpointError: no such file, or it belongs to another model; the optimizer is then unchanged.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} holds no optimizer state that can be read: {error}") from error
    state: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        found = {key: tensors.pop(f"{name}/{key}") for key in _STATE if f"{name}/{key}" in tensors}
        if not found:
            continue  # a parameter that never had a gradient has no state
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in found or found[key].shape != parameter.shape or found[key].dtype != parameter.dtype:
                raise CheckpointError(
                    f"{path}: {name}/{key} is {_describe(found.get(key))}, the model's parameter is "
                    f"{_describe(parameter)}; resume with the model and dtype the checkpoint was made with"
                )
        state[parameter] = {key: value.to(parameter.device) for key, value in found.items()}
    if tensors:
        raise CheckpointError(
            f"{path} has state of {len(tensors)} tensors that this model does not have, for example "
            f"{next(iter(tensors))!r}; resume with the model the checkpoint was made with"
        )
    optimizer.state.clear()
    optimizer.state.update(state)


def _describe(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
