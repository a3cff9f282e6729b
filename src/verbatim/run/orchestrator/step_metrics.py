"""Collects the metrics of a step (rollouts, training, sampler) and passes them to the observer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np

from verbatim.algorithms.curriculum import Flatness
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.trajectories import Ledger, TrajectoryOutcome
from verbatim.core.types import Float32, Group, TrainingSample
from verbatim.environments.environment import Environment, succeeded
from verbatim.inference.sampler import Sampler
from verbatim.run.orchestrator.assemble import GroupRules, kept_set_metrics, rollout_metrics, truncation_metrics
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.loop_lag import LoopLag
from verbatim.run.orchestrator.producer import Submitted
from verbatim.run.orchestrator.schedule import Observer
from verbatim.trainer.transport import StepReport


@runtime_checkable
class ReportsStats(Protocol):
    """A sampler that reports how busy it was."""

    def stats(self) -> Any:
        """Totals since the sampler's start: `sampled_tokens`, and `busy_seconds`, the time with at least one sequence
        in flight."""


@runtime_checkable
class ReportsMetrics(Protocol):
    """A sampler with its own metrics."""

    def metrics(self) -> Mapping[str, float]:
        """The metrics by name; rates are averages since the previous call."""


@dataclass(kw_only=True, eq=False)
class StepMetrics:
    """Collects the metrics of each step, checks the ledger, and passes the metrics to the observer."""

    sampler: Sampler
    dispatcher: Dispatcher
    ledger: Ledger
    rules: Mapping[str, GroupRules]
    environments: Mapping[str, Environment]
    observer: Observer
    _stats_before: tuple[int, float] = (0, 0.0)

    def begin(self, lag: LoopLag) -> None:
        """Start the first step; `lag` measures the event loop."""
        self._lag = lag
        self._sampled_before = self.ledger.sampled
        self._step_began = time.perf_counter()

    async def record(
        self, submitted: Submitted, report: StepReport, timings: Mapping[str, float], *, waiting: int
    ) -> None:
        """Record a finished step: check the ledger, then pass the metrics to the observer.

        Args:
            submitted: The batch.
            report: The trainer's report.
            timings: The `time/...` metrics that are known for this step.
            waiting: Number of batches that the trainer still has.
        """
        pending = self.dispatcher.num_pending_tokens
        self.ledger.check(pending)
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        metrics = {
            **report.metrics,
            **self.ledger.metrics(pending),
            "policy_version": report.version,
            "time/step": seconds,
            "time/wait_for_batch": submitted.wait_for_batch,
            **timings,
            "queue/groups_in_flight": self.dispatcher.num_running,
            "queue/groups_ready": self.dispatcher.num_ready,
            "queue/batches_submitted": waiting,
            **self._lag.read(),
            **self._sampler_metrics(seconds),
            **(self.sampler.metrics() if isinstance(self.sampler, ReportsMetrics) else {}),
            **self.dispatcher.metrics(),
        }
        # The observer is called on a thread, because observers write files and may take long. Dropped groups are taken
        # here, on the loop's thread.
        await asyncio.to_thread(self._tell, submitted, metrics, self.dispatcher.take_dropped(), report.tokens)

    def _tell(
        self,
        submitted: Submitted,
        metrics: Mapping[str, float],
        dropped: Sequence[tuple[Flatness | None, Group]],
        tokens: TrainedTokens | None,
    ) -> None:
        """Add the metrics of the batch and of dropped groups, and pass everything to the observer."""
        batch, number = submitted.batch, submitted.number
        oldest = max(rules.max_off_policy_steps for rules in self.rules.values())
        successes = {
            t.trajectory_id: succeeded(self.environments[t.env], t) for g in batch for t in g.group.trajectories
        }
        everything = {
            **rollout_metrics(batch, number, successes, oldest),
            **truncation_metrics(batch, self.rules),
            **kept_set_metrics(batch),
            **metrics,
        }
        counts = {(env, kind): 0 for env in self.rules for kind in get_args(Flatness)}
        for kind, group in dropped:
            if kind is None:
                everything["staleness/dropped"] += len(group.completed)
            else:
                counts[group.env, kind] += len(group.completed)
        everything |= {f"filtered_rollouts/{env}/{kind}": count for (env, kind), count in counts.items()}
        outcomes = [outcome for group in batch for outcome in group.outcomes]
        samples = [sample for group in batch for sample in group.samples]
        if tokens is not None:
            outcomes = _with_tokens(outcomes, samples, tokens)
        outcomes = _with_teacher(outcomes, samples)
        for kind, group in dropped:
            outcomes += _dropped_outcomes(kind, group)
        self.observer.on_step(number + 1, everything, outcomes)

    def _sampler_metrics(self, seconds: float) -> dict[str, float]:
        """The sampler's metrics since the last step. A sampler that does not report its busy time counts as busy."""
        if not isinstance(self.sampler, ReportsStats):
            sampled, self._sampled_before = self.ledger.sampled - self._sampled_before, self.ledger.sampled
            return {"sampler/tokens_per_second": sampled / seconds if seconds > 0 else 0.0}
        stats, before = self.sampler.stats(), self._stats_before
        self._stats_before = (stats.sampled_tokens, stats.busy_seconds)
        busy = stats.busy_seconds - before[1]
        return {
            "sampler/tokens_per_second": (stats.sampled_tokens - before[0]) / busy if busy > 0 else 0.0,
            "time/sampler_idle": max(0.0, seconds - busy),
        }


def _with_tokens(
    outcomes: Sequence[TrajectoryOutcome], samples: Sequence[TrainingSample], tokens: TrainedTokens
) -> list[TrajectoryOutcome]:
    """The outcomes of a batch, with the logprobs and gradients that the trainer computed."""
    found: dict[str, dict[int, tuple[Float32, Float32]]] = {}
    for sample, turn, logprobs, gradients in tokens.by_turn(samples):
        found.setdefault(sample.trajectory_id, {})[turn] = (logprobs, gradients)
    updated = []
    for outcome in outcomes:
        of_turn = found.get(outcome.trajectory.trajectory_id, {})
        pairs = [of_turn.get(turn, (None, None)) for turn in range(len(outcome.turns))]
        updated.append(
            replace(outcome, trainer_logprobs=tuple(t for t, _ in pairs), gradients=tuple(g for _, g in pairs))
        )
    return updated


def _with_teacher(outcomes: Sequence[TrajectoryOutcome], samples: Sequence[TrainingSample]) -> list[TrajectoryOutcome]:
    """The outcomes of a batch, with the teacher's logprobs of the turns that the teacher scored."""
    found: dict[str, dict[int, Float32]] = {}
    for sample in samples:
        if sample.teacher_logprobs is not None:
            for turn in np.unique(sample.trained("chunk_ids")).tolist():
                logprobs = sample.teacher_logprobs[sample.chunk_ids == turn]
                found.setdefault(sample.trajectory_id, {})[turn] = logprobs
    return [
        replace(outcome, teacher_logprobs=tuple(map(of_turn.get, range(len(outcome.turns)))))
        if (of_turn := found.get(outcome.trajectory.trajectory_id)) is not None
        else outcome
        for outcome in outcomes
    ]


def _dropped_outcomes(kind: Flatness | None, group: Group) -> list[TrajectoryOutcome]:
    """The outcomes of a group that the dispatcher dropped. `kind` is what online difficulty filtering found; None if
    the group was too old."""
    if kind is not None:
        return [TrajectoryOutcome.of_dropped(trajectory, "difficulty") for trajectory in group.trajectories]
    return [TrajectoryOutcome.of_dropped(t, "stale" if t.error is None else "error") for t in group.trajectories]
