"""Defines the run's schedule, and the protocols of the loop's observers and checkpointer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.rollouts import RolloutSetup
from verbatim.run.orchestrator.evaluate import Evaluation
from verbatim.trainer.transport import TrainerLink


class Observer(Protocol):
    """Receives each step and evaluation. Called on a thread, one call at a time."""

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Called after a batch was trained.

        Args:
            step: Number of steps done.
            metrics: The metrics of this step.
            outcomes: The outcomes of the batch's trajectories, and of trajectories dropped before they reached a batch.
        """

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Called after the policy of this step was evaluated; step 0 is before training."""

    def stage(
        self, what: str, total: int | None = None, *, count: Callable[[], int] | None = None
    ) -> AbstractContextManager[object]:
        """Show progress while the block runs; `count` returns how much of `total` is done. Called on the event loop."""


class Checkpointer(Protocol):
    """Stores what a run needs to resume."""

    async def save(
        self, step: int, trainer: TrainerLink, state: Mapping[str, Any], trainer_state: Path | None = None
    ) -> None:
        """Store the state after this step. `state["evaluations"]["best"]` has the step of the best evaluation so far;
        that step's checkpoint must be kept.

        Args:
            step: Number of steps done: batches trained and settled in the ledger.
            trainer: The trainer, which saves its part if `trainer_state` is None.
            state: The loop's own part.
            trainer_state: A folder with the trainer's part, if this part has been saved already; the folder is moved.
        """

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        """Record that the evaluation after this step, whose checkpoint exists, is the best so far."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSchedule:
    """The number of steps, and when to evaluate and to write checkpoints."""

    max_steps: int
    eval_setups: Sequence[RolloutSetup]
    """The environments to evaluate; may be empty."""
    eval_interval: int
    eval_episodes: int
    """Maximum number of episodes per evaluation and environment."""
    eval_examples: int | None
    """Maximum number of examples per environment; None for as many as there are episodes."""
    eval_seed: int
    checkpoint_interval: int
    keeps_best: bool = False
    """True if the checkpoint of the best evaluation is kept."""
    learns_from_advantages: bool = True
    """True if a token with advantage 0 has no gradient: there is no teacher, and the loss is a built-in loss."""
    canary_tolerance: float = 1e-4
    """Largest allowed mean difference between the sampler's and the trainer's logprobs after a weight update."""
    checks_kept_sets: bool = False
    """True if kept sets are compared as well: some trained tokens come from a truncated distribution."""
    shares_device: bool = False
    """True if sampler and trainer take turns on one device."""

    def is_evaluated(self, step: int) -> bool:
        """True if the policy is evaluated after this step. The last step always is."""
        return step % self.eval_interval == 0 or step == self.max_steps

    def is_kept(self, step: int) -> bool:
        """True if a checkpoint is due after this step by the interval alone. The checkpoint of the last step is written
        separately."""
        return step % self.checkpoint_interval == 0 and step < self.max_steps

    def may_be_kept(self, step: int) -> bool:
        """True if the trainer must store its state after this step. Only later, when the trainer may already be working
        on the next batch, is it known if the evaluation is the best so far and the state is thus needed."""
        return step < self.max_steps and (self.is_kept(step) or (self.keeps_best and self.is_evaluated(step)))
