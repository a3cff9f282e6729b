"""What a monitor is, the metrics that every run reports, and how several monitors listen to one run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
"""Name to value. A value may be NaN (nothing to average) or infinite."""

REWARD = "reward/mean"
"""Mean raw reward of the batch's rollouts."""
SUCCESS = "success"
"""Share of episodes that reached their goal, in training and in evaluation."""
TURNS = "turns"
"""Mean turns of a trajectory."""
SAMPLER_SPEED = "sampler/tokens_per_second"
"""Completion tokens per second of wall-clock time."""
TRAINER_SPEED = "tokens_per_second"
"""Computed tokens per second of wall-clock time spent training."""
MISMATCH_KL = "mismatch_kl"
"""Of the trainer's from the sampler's distribution, mean over trained tokens."""

STALENESS = "staleness/mean"
"""Mean age of the batch's rollouts when they were trained: batches since the version that began them."""
SAMPLER_IDLE = "time/sampler_idle"
"""Seconds of the step in which no sequence was in flight."""
TRAINER_IDLE = "time/trainer_idle"
"""Seconds for which the trainer waited for the batch."""


class Monitor(Protocol):
    """Listens to a run. It never decides anything, and the run goes on without it."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """A batch was trained; `step` is the number of batches trained so far, 1 after the first."""

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """The policy was evaluated on one environment after `step` batches; 0 is before the first."""

    def close(self) -> None:
        """The run is over."""


class Monitors:
    """Several monitors as one. One that raises is reported, with its traceback, and the run goes on."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self.num_failures = 0
        """Calls that raised."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Tell all of them, in order."""
        for monitor in self.monitors:
            self._guard(monitor, lambda monitor=monitor: monitor.on_step(step, metrics))  # type: ignore[misc]

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """Tell all of them, in order."""
        for monitor in self.monitors:
            self._guard(monitor, lambda monitor=monitor: monitor.on_eval(step, env, metrics))  # type: ignore[misc]

    def close(self) -> None:
        """Close all of them, in order."""
        for monitor in self.monitors:
            self._guard(monitor, monitor.close)

    def _guard(self, monitor: Monitor, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a full disk or a plotting library must not cost hours of training
            self.num_failures += 1
            logger.exception("monitor %s failed; the run goes on without what it would have shown",
                             type(monitor).__name__)  # fmt: skip
