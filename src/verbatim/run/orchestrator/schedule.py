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
    """Is told of each step and evaluation. Called on a thread, one call at a time."""

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> None:
        """The batch of this step was trained.

        Args:
            step: Steps done.
            metrics: The step's.
            outcomes: Of the batch's trajectories, and of those that were dropped before they came into one.
        """

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """The policy after this step was evaluated; 0 is before the first."""

    def stage(
        self, what: str, total: int | None = None, *, count: Callable[[], int] | None = None
    ) -> AbstractContextManager[object]:
        """Something that may take a while goes on as long as the block runs; `count` gives what is done of it. Called
        on the event loop."""


class Checkpointer(Protocol):
    """Keeps what a run needs to continue."""

    async def save(
        self, step: int, trainer: TrainerLink, state: Mapping[str, Any], trainer_state: Path | None = None
    ) -> None:
        """Keep the state after this step. `state["evaluations"]["best"]` names the step of the best evaluation so far,
        whose checkpoint stays.

        Args:
            step: Steps done: batches trained and settled.
            trainer: Asked for its part, where `trainer_state` is None.
            state: The loop's own part.
            trainer_state: Where the trainer left its part already, to be moved away.
        """

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        """The evaluation after this step, whose state was kept before it, is the best so far."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSchedule:
    """How many steps a run has, and what happens between them."""

    max_steps: int
    eval_setups: Sequence[RolloutSetup]
    """What is evaluated; empty: nothing."""
    eval_interval: int
    eval_episodes: int
    """Most episodes of each evaluation, for each environment."""
    eval_examples: int | None
    """Most examples of each environment; None: as many as there are episodes."""
    eval_seed: int
    checkpoint_interval: int
    keeps_best: bool = False
    """Whether the state of the best evaluation is kept."""
    learns_from_advantages: bool = True
    """Whether a token with the advantage 0 teaches nothing: no teacher is followed, and the loss is one of ours."""
    canary_tolerance: float = 1e-4
    """Largest mean difference of the sampler's logprobs from the trainer's after a weight update."""
    checks_kept_sets: bool = False
    """Whether kept sets are compared there too: something that is trained is drawn from a cut distribution."""
    shares_device: bool = False
    """Whether sampler and trainer take turns on one device."""

    def is_evaluated(self, step: int) -> bool:
        """Whether there is an evaluation after this step, the last one's included."""
        return step % self.eval_interval == 0 or step == self.max_steps

    def is_kept(self, step: int) -> bool:
        """Whether there is a checkpoint after this step, whatever is measured; that of the last step is another one."""
        return step % self.checkpoint_interval == 0 and step < self.max_steps

    def may_be_kept(self, step: int) -> bool:
        """Whether the trainer leaves its state after this step: the evaluation says only later whether it is the best,
        and by then the trainer is at work on the next batch."""
        return step < self.max_steps and (self.is_kept(step) or (self.keeps_best and self.is_evaluated(step)))
