"""Counts optimizer steps across resumes, and determines the learning rate of each step."""

from __future__ import annotations

import logging
import math

from verbatim.config.schema import OptimConfig
from verbatim.core.errors import CheckpointError
from verbatim.trainer.optim import learning_rate
from verbatim.trainer.progress import TrainerProgress

logger = logging.getLogger(__name__)


class Schedule:
    """The learning-rate schedule of a run.

    Args:
        config: Peak learning rate, warmup and shape.
        total: Length of the schedule: the number of optimizer steps in the whole run.
    """

    def __init__(self, config: OptimConfig, total: int) -> None:
        self._config = config
        self.total = total
        """Length of the schedule in optimizer steps."""
        self.num_done = 0
        """Completed optimizer steps."""
        self._num_planned = 0
        self._last_lr: float | None = None

    def take(self) -> float:
        """Count the next optimizer step and return its learning rate."""
        assert self.num_done < self.total, f"all {self.total} optimizer steps of the schedule are done"
        self._last_lr = learning_rate(self._config, self.num_done, self.total)
        self.num_done += 1
        return self._last_lr

    def batch_is_over(self, planned: int) -> None:
        """Record that a batch with this many planned optimizer steps is over; the batch may have taken fewer steps."""
        self._num_planned += planned

    @property
    def progress(self) -> TrainerProgress:
        """The progress to save."""
        return TrainerProgress(
            num_optimizer_steps=self.num_done,
            planned_optimizer_steps=self._num_planned,
            total_optimizer_steps=self.total,
            last_lr=self._last_lr,
            next_lr=learning_rate(self._config, self.num_done, self.total),
        )

    def go_on(self, before: TrainerProgress, left: int | None) -> None:
        """Continue from a saved progress. The schedule's length becomes the steps planned so far plus `left`.

        A warning is logged if the learning rate jumps, that is, if the next rate differs from the saved `next_lr`.

        Args:
            before: The saved progress, under the schedule at that time.
            left: Number of optimizer steps planned for the remaining batches; None to keep the total.

        Raises:
            CheckpointError: more steps have been completed than the schedule has.
        """
        total = self.total if left is None else before.planned_optimizer_steps + left
        if before.num_optimizer_steps > total:
            raise CheckpointError(
                f"{before.num_optimizer_steps} optimizer steps are done, but this run has only {total} in "
                "all; raise max_steps to continue"
            )
        self.total, self.num_done, self._last_lr = total, before.num_optimizer_steps, before.last_lr
        self._num_planned = before.planned_optimizer_steps
        if self.num_done < self.total:
            self._warn_of_a_jump(before)

    def _warn_of_a_jump(self, before: TrainerProgress) -> None:
        """Log a warning if the next learning rate differs from the learning rate that the saved schedule would have
        used."""
        now, then = learning_rate(self._config, self.num_done, self.total), before.next_lr
        if not math.isclose(now, then, rel_tol=1e-9):
            last = f"; the last one was taken at {before.last_lr:.3g}" if before.last_lr is not None else ""
            logger.warning(
                "the learning rate jumps: optimizer step %d of %d is taken at %.3g, but would be at %.3g in "
                "the previous schedule of %d steps%s",
                self.num_done + 1,
                self.total,
                now,
                then,
                before.total_optimizer_steps,
                last,
            )
