"""Builds the AdamW optimizer, clips gradients, computes learning rates."""

from __future__ import annotations

import math

import torch
from torch import nn

from verbatim.config.schema import OptimConfig
from verbatim.core.errors import RunStopped
from verbatim.trainer.optimizer_state import local
from verbatim.trainer.parallel.ranks import Ranks


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW without weight decay on norms, biases and other one-dimensional parameters."""
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
    """Scale the gradients so that their total norm, over all shards, is at most `max_norm`. Returns the norm before
    clipping.

    Raises:
        RunStopped: the norm is not finite; the message names the parameters. Raised on all ranks.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
    grads = [local(parameter.grad) for _, parameter in named if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if ranks is not None:
        # Norms of shards add up as squares. The sum is in float64, so that it hardly depends on the number of ranks.
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
    elif (scale := max_norm / (norm.item() + 1e-6)) < 1:  # the same epsilon as in torch's clip_grads_with_norm_
        for grad in grads:
            grad.mul_(scale)
    return float(norm)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step number `step`, counted from 0.

    The rate rises linearly to the peak at step `warmup_steps`. Then it follows the schedule, which reaches
    `min_lr_ratio` times the peak only after the last step, at `step = total_steps`. So no step has a rate of 0.

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
