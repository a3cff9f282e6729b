"""Checks a batch before it is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verbatim.algorithms.losses import Loss
from verbatim.core.errors import UsageError
from verbatim.core.types import TrainingSample


def check_samples(samples: Sequence[TrainingSample], loss: Loss) -> None:
    """Refuse samples that a loss cannot be computed on.

    Raises:
        UsageError: a trajectory without an id, where the loss works on whole trajectories.
    """
    for sample in samples:
        missing = sample.loss_mask & np.isnan(sample.logprobs)
        assert not (loss.needs_inference_logprobs and missing.any()), (
            f"trajectory {sample.trajectory_id!r}: {int(missing.sum())} trained tokens have no inference logprob, "
            f"which the loss {loss.name} needs; they must be dropped and counted before training"
        )
    by_trajectory = loss.level != "token" or loss.normalizer == "trajectories"
    if by_trajectory and len(samples) > 1 and any(not sample.trajectory_id for sample in samples):
        raise UsageError(
            f"a training sample has no trajectory_id, but the loss {loss.name} works on whole "
            "trajectories; set trajectory_id on every Trajectory before build_samples"
        )
