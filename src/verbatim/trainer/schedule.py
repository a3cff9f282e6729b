"""Counts optimizer steps, and says at which learning rate each of them is taken, also in a run that is resumed."""

from __future__ import annotations

import logging
import math

from verbatim.config.schema import OptimConfig
from verbatim.core.errors import CheckpointError
from verbatim.trainer.optim import learning_rate
from verbatim.trainer.progress import TrainerProgress

logger = logging.getLogger(__name__)


class Schedule:
    """The learning rates of a run's optimizer steps.

    Args:
        config: Peak and shape.
        total: Optimizer steps of the whole run, over which the shape is stretched.
    """

    def __init__(self, config: OptimConfig, total: int) -> None:
        self._config = config
        self.total = total
        """Optimizer steps over which it is stretched."""
        self.num_done = 0
        """Optimizer steps that are done."""
        self._num_planned = 0
        self._last_lr: float | None = None

    def take(self) -> float:
        """The learning rate of the next optimizer step, which is counted."""
        assert self.num_done < self.total, f"all {self.total} optimizer steps of the schedule are done"
        self._last_lr = learning_rate(self._config, self.num_done, self.total)
        self.num_done += 1
        return self._last_lr

    def batch_is_over(self, planned: int) -> None:
        """A batch is trained, for which the schedule had this many optimizer steps."""
        self._num_planned += planned

    @property
    def progress(self) -> TrainerProgress:
        """Where it is."""
        return TrainerProgress(
            num_optimizer_steps=self.num_done,
            planned_optimizer_steps=self._num_planned,
            total_optimizer_steps=self.total,
            last_lr=self._last_lr,
            next_lr=learning_rate(self._config, self.num_done, self.total),
        )

    def go_on(self, before: TrainerProgress, left: int | None) -> None:
        """Go on where a trainer was: stretched over what it had for the batches so far and what is left.

        A learning rate that is not the one that would have come next is logged as a warning.

        Args:
            before: Where that trainer was, under the schedule of then.
            left: Optimizer steps that there are for the batches that are left; None: the total stays.

        Raises:
            CheckpointError: more are done than there are.
        """
        total = self.total if left is None else before.planned_optimizer_steps + left
        if before.num_optimizer_steps > total:
            raise CheckpointError(
                f"{before.num_optimizer_steps} optimizer steps are done, this run has {total} in "
                "all; raise max_steps to go on"
            )
        self.total, self.num_done, self._last_lr = total, before.num_optimizer_steps, before.last_lr
        self._num_planned = before.planned_optimizer_steps
        if self.num_done < self.total:
            self._warn_of_a_jump(before)

    def _warn_of_a_jump(self, before: TrainerProgress) -> None:
        now, then = learning_rate(self._config, self.num_done, self.total), before.next_lr
        if not math.isclose(now, then, rel_tol=1e-9):
            last = f"; the last one was taken at {before.last_lr:.3g}" if before.last_lr is not None else ""
            logger.warning(
                "the learning rate jumps: optimizer step %d of %d is taken at %.3g, and would be at %.3g in "
                "the schedule before, of %d%s",
                self.num_done + 1,
                self.total,
                now,
                then,
                before.total_optimizer_steps,
                last,
            )
