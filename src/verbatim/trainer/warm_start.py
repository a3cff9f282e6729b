"""Trains on recorded conversations before reinforcement learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from verbatim.core.types import TrainingSample
from verbatim.trainer.trainer import Trainer


def warm_start(
    trainer: Trainer,
    conversations: Sequence[Sequence[TrainingSample]],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Take `steps` optimizer steps on `batch_size` conversations each, in shuffled passes over all of them.

    The trainer is made with the `sft` loss; a conversation is its samples. `on_step` is called with the optimizer
    step's number, from 1, and its metrics.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    order: list[int] = []
    for step in range(1, steps + 1):
        while len(order) < min(batch_size, len(conversations)):
            order.extend(rng.permutation(len(conversations)).tolist())
        batch, order = order[:batch_size], order[batch_size:]
        # A batch may end one pass and begin the next: a conversation that is in it twice is two trajectories.
        metrics = trainer.train_batch(
            [
                dataclasses.replace(sample, trajectory_id=f"{place}:{sample.trajectory_id}")
                for place, i in enumerate(batch)
                for sample in conversations[i]
            ]
        )
        if on_step is not None:
            on_step(step, metrics)
