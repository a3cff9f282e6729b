"""Supervised fine-tuning on recorded conversations before reinforcement learning (warm start)."""

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
    """Take `steps` optimizer steps on `batch_size` conversations each, in shuffled epochs.

    Args:
        trainer: A trainer with the `sft` loss.
        conversations: The training samples of each conversation.
        steps: Number of optimizer steps.
        batch_size: Number of conversations per step; fewer if there are fewer conversations in all.
        seed: Seed of the shuffles.
        on_step: Called after each step with the step's number, counted from 1, and the step's metrics.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    order: list[int] = []
    for step in range(1, steps + 1):
        while len(order) < min(batch_size, len(conversations)):
            order.extend(rng.permutation(len(conversations)).tolist())
        batch, order = order[:batch_size], order[batch_size:]
        # A batch may span two epochs and contain a conversation twice; the place in the id makes two trajectories of
        # it.
        metrics = trainer.train_batch(
            [
                dataclasses.replace(sample, trajectory_id=f"{place}:{sample.trajectory_id}")
                for place, i in enumerate(batch)
                for sample in conversations[i]
            ]
        )
        if on_step is not None:
            on_step(step, metrics)
