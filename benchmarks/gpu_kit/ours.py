"""What our trainer computes on a batch: the gradient of an optimizer step before it is clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.types import TrainingSample
from verbatim.trainer import optim
from verbatim.trainer.trainer import Trainer

from .reference import Gradient

NO_CHANGE = OptimConfig(lr=1e-30)
"""Steps that leave the weights as they are."""


@dataclass
class Step:
    """An optimizer step."""

    gradient: Gradient = field(default_factory=dict)
    """On the CPU in float64, by parameter name."""
    metrics: dict[str, float] = field(default_factory=dict)
    """As `Trainer.train_batch` returns them."""


def trainer_of(folder: Path, device: str, *, master: str = "float32", **settings: Any) -> Trainer:
    """A trainer with the default loss."""
    config = TrainerConfig(**{"optim": NO_CHANGE, "device": device, **settings})
    return Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=1000, dtype=master)


def step_of(trainer: Trainer, samples: Sequence[TrainingSample]) -> Step:
    """Take an optimizer step."""
    found = Step()

    def noted(model: Any, *rest: Any) -> float:
        found.gradient = {
            name: p.grad.double().cpu().clone() for name, p in model.named_parameters() if p.grad is not None
        }
        return optim.clip_gradients(model, *rest)

    with mock.patch("verbatim.trainer.trainer.clip_gradients", noted):
        found.metrics = trainer.train_batch(samples)
    return found


def gradient_of(
    folder: Path,
    device: str,
    samples: Sequence[TrainingSample],
    *,
    prepare: Callable[[Trainer], None] = lambda _: None,
    **settings: Any,
) -> Gradient:
    """The gradient of one step of a new trainer.

    Raises:
        AssertionError: the samples were not packed as `packing` says.
    """
    trainer = trainer_of(folder, device, **settings)
    prepare(trainer)
    step = step_of(trainer, samples)
    packed = step.metrics["packing/tree"]
    assert settings.get("packing") != "tree" or packed == 1.0, f"packing/tree is {packed}, expected 1"
    assert settings.get("packing") != "rows" or packed == 0.0, f"packing/tree is {packed}, expected 0"
    assert step.metrics["trained_tokens"] == sum(sample.num_trained_tokens for sample in samples)
    return step.gradient


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name."""
    found: torch.dtype = getattr(torch, name)
    return found
