"""Computes the learning rate of each optimizer step."""

from __future__ import annotations

import math
from typing import Literal


def lr_factor(
    step: int,
    *,
    total_steps: int,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
) -> float:
    """What the peak learning rate is multiplied by at an optimizer step.

    A straight line from 0 before the first optimizer step to 1 at number `warmup_steps`, then the schedule, which
    reaches `min_lr_ratio` as the last one is done: at `step = total_steps`. So none is taken at a learning rate of 0.

    Example: `total_steps = 6`, `warmup_steps = 1`, linear to 0: 0.5, 1, 0.8, 0.6, 0.4, 0.2.

    Args:
        step: The number of the optimizer step: 0 is the first; at most `total_steps`.
        total_steps: Optimizer steps of the whole run.
        schedule: Shape after the warm-up.
        warmup_steps: Optimizer steps below the peak at the beginning.
        min_lr_ratio: Where linear and cosine end.
    """
    assert 0 <= step <= total_steps, f"optimizer step {step} of {total_steps}"
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_lr_ratio + (1 - min_lr_ratio) * left
