"""Builds AdamW over a model's parameters, clips gradients, computes learning rates."""

from __future__ import annotations

import math

import torch
from torch import nn

from verbatim.config.schema import OptimConfig
from verbatim.core.errors import RunStopped
from verbatim.trainer.optimizer_state import local
from verbatim.trainer.parallel.ranks import Ranks


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW whose weight decay leaves out norms, biases and every other one-dimensional parameter."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel instead of a dozen, on CPU and CUDA alike
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def clip_gradients(model: nn.Module, max_norm: float, ranks: Ranks | None = None) -> float:
    """Scale gradients down to this norm, where theirs is larger; returns it as it was: of all shards.

    Raises:
        RunStopped: it is not finite; on all ranks. Names parameters.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
    grads = [local(parameter.grad) for _, parameter in named if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if ranks is not None:
        # Squares add up; in float64, because a sum over ranks is rounded in another order.
        squares = sum((torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for grad in grads), norm.double() * 0)
        norm = ranks.total(squares.cpu()).sqrt()
    if not torch.isfinite(norm):
        bad = [name for (name, _), grad in zip(named, grads, strict=True) if not grad.isfinite().all()]
        if ranks is not None:
            bad = sorted({name for names in ranks.gather(bad) for name in names})
        error = RunStopped(
            f"the gradient's norm is {norm.item()} although the loss is finite; not finite in "
            f"{len(bad)} parameters: {', '.join(bad[:3])}"
        )
        if ranks is not None:
            ranks.share(None, error)
        raise error
    if ranks is None:
        torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in named], max_norm, norm)
    elif (scale := max_norm / (norm.item() + 1e-6)) < 1:
        for grad in grads:
            grad.mul_(scale)
    return float(norm)


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
