"""Tracks a metric over the evaluations of a run: which evaluation was the best, and whether the metric is still
improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from verbatim.config.orchestrator import CriterionConfig, EarlyStoppingConfig
from verbatim.core.records.equality import is_at_most
from verbatim.core.records.failed import MAX_FAILED, too_many_failed
from verbatim.run.orchestrator.evaluate import Evaluation

logger = logging.getLogger(__name__)


def measured(criterion: CriterionConfig, evaluations: Mapping[str, Evaluation]) -> float | None:
    """The criterion's value, averaged over its environments; None if an environment has no value: it was not evaluated,
    or the metric is missing, NaN or infinite."""
    values = []
    for evaluation in _counted(criterion, evaluations):
        value = float(evaluation.metrics.get(criterion.metric, math.nan))
        if not evaluation.num_episodes or not math.isfinite(value):
            return None
        values.append(value)
    return sum(values) / len(values) if values else None


def _counted(criterion: CriterionConfig, evaluations: Mapping[str, Evaluation]) -> list[Evaluation]:
    """The evaluations of the environments that the criterion refers to."""
    return [evaluations[criterion.env]] if criterion.env is not None else list(evaluations.values())


def improves(criterion: CriterionConfig, value: float, best: float | None, by: float = 0.0) -> bool:
    """True if `value` is better than `best` by more than `by`. A difference within rounding does not count."""
    if best is None:
        return True
    gain = value - best if criterion.mode == "max" else best - value
    return not is_at_most(gain, by)


def _named(criterion: CriterionConfig) -> dict[str, Any]:
    """What the criterion measures, as plain JSON values."""
    return {"metric": criterion.metric, "mode": criterion.mode, "env": criterion.env}


@dataclass(kw_only=True)
class BestEvaluation:
    """The best evaluation so far; of several equally good evaluations, the first.

    Example:
        >>> best = BestEvaluation(criterion=CriterionConfig(metric="success"))
        >>> [best.observe(step, value) for step, value in ((0, 0.25), (10, 0.5), (20, 0.5), (30, 0.75))]
        [True, True, False, True]
        >>> best.step, best.value
        (30, 0.75)
    """

    criterion: CriterionConfig
    step: int | None = None
    """The step after which the evaluation was made; None if nothing has been measured yet."""
    value: float | None = None

    def observe(self, step: int, value: float) -> bool:
        """Add a measured evaluation. Returns True if it is the best so far."""
        if not improves(self.criterion, value, self.value):
            return False
        self.step, self.value = step, value
        return True

    def state_dict(self) -> dict[str, Any] | None:
        """Plain JSON values: step, value and criterion; None before the first measured evaluation."""
        if self.step is None:
            return None
        return {"step": self.step, "value": self.value, **_named(self.criterion)}


@dataclass(kw_only=True)
class EarlyStopping:
    """Counts consecutive evaluations without an improvement (Prechelt 1998, "Early stopping, but when?").

    Example:
        >>> stopping = EarlyStopping(rule=EarlyStoppingConfig(metric="success", patience=2, min_delta=0.1))
        >>> for step, value in ((0, 0.25), (10, 0.5), (20, 0.5625), (30, 0.375)):
        ...     stopping.observe(step, value)
        >>> stopping.reason
        'success did not rise by more than 0.1 above 0.500 (step 10) in the evaluations after steps 20, 30'
    """

    rule: EarlyStoppingConfig
    best: float | None = None
    """The value of the last improvement."""
    best_step: int | None = None
    """The step of the last improvement."""
    since: list[int] = field(default_factory=list)
    """The steps of the evaluations since the last improvement."""

    def observe(self, step: int, value: float) -> None:
        """Add a measured evaluation. The evaluation is ignored if there already is a reason to stop."""
        if self.reason is not None:
            return
        if improves(self.rule, value, self.best, self.rule.min_delta):
            self.best, self.best_step, self.since = value, step, []
        else:
            self.since.append(step)

    @property
    def reason(self) -> str | None:
        """Why the run should end; None if the run should continue."""
        if len(self.since) < self.rule.patience:
            return None
        assert self.best is not None
        criterion = self.rule
        which = f"{criterion.metric} of {criterion.env}" if criterion.env is not None else criterion.metric
        verb, beyond = ("rise", "above") if criterion.mode == "max" else ("fall", "below")
        by = f" by more than {criterion.min_delta:g}" if criterion.min_delta else ""
        steps = ", ".join(map(str, self.since))
        name = "evaluation after step" if len(self.since) == 1 else "evaluations after steps"
        return f"{which} did not {verb}{by} {beyond} {self.best:.3f} (step {self.best_step}) in the {name} {steps}"

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {"best": self.best, "best_step": self.best_step, "since": list(self.since), **_named(self.rule)}


@dataclass(kw_only=True)
class EvalProgress:
    """The state that a run's evaluations update: the best evaluation, and early stopping."""

    best: BestEvaluation | None = None
    """The best evaluation so far; None if it is not tracked."""
    early_stopping: EarlyStopping | None = None
    """Decides when to stop early; None if the run never stops early."""
    played: Mapping[str, Any] = field(default_factory=dict)
    """The settings that decide which episodes an evaluation plays, by name; plain JSON values."""
    max_failed: float = MAX_FAILED
    """The largest share of failed episodes that an environment may have for its evaluation to count."""
    _warned: set[str] = field(default_factory=set)

    def observe(self, step: int, evaluations: Mapping[str, Evaluation]) -> bool:
        """Add the evaluations of all environments after this step. Returns True if these are the best so far.

        An evaluation without a value, or with too many failed episodes, counts neither as the best nor for early
        stopping; this is logged.
        """
        if self.best is not None and (value := self._value(self.best.criterion, step, evaluations)) is not None:
            is_best = self.best.observe(step, value)
        else:
            is_best = False
        watch = self.early_stopping
        if watch is not None and (value := self._value(watch.rule, step, evaluations)) is not None:
            watch.observe(step, value)
        return is_best

    def _value(self, criterion: CriterionConfig, step: int, evaluations: Mapping[str, Evaluation]) -> float | None:
        """The criterion's value; None, with a warning, if the value is missing or too many episodes failed."""
        failed = {
            one.env: too_many_failed(one.num_failed, one.num_episodes, self.max_failed)
            for one in _counted(criterion, evaluations)
        }
        if clauses := [f"{clause} in {env}" for env, clause in failed.items() if clause is not None]:
            logger.warning(
                "the evaluation after step %d counts neither as the best nor for early stopping: %s, so %s would "
                "describe only the remaining episodes (orchestrator.eval.max_failed = %g)",
                step,
                ", ".join(clauses),
                criterion.metric,
                self.max_failed,
            )
            return None
        value = measured(criterion, evaluations)
        if value is None and criterion.metric not in self._warned:
            self._warned.add(criterion.metric)
            names = ", ".join(sorted({name for evaluation in evaluations.values() for name in evaluation.metrics}))
            logger.warning(
                "%s was not measured in the evaluation after step %d, so this evaluation counts neither as the best "
                "nor for early stopping; its metrics are %s",
                criterion.metric,
                step,
                names,
            )
        return value

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its last step; None if the run does not end early."""
        return self.early_stopping.reason if self.early_stopping is not None else None

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {
            "best": self.best.state_dict() if self.best is not None else None,
            "early_stopping": self.early_stopping.state_dict() if self.early_stopping is not None else None,
            "played": dict(self.played),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Values of a different criterion, or of different episodes, are not comparable and
        are left out."""
        best, stopping, played = state["best"], state["early_stopping"], state["played"]
        if others := sorted(name for name in {*played, *self.played} if played.get(name) != self.played.get(name)):
            if best is not None or stopping is not None:
                logger.warning(
                    "%s changed, so evaluations now play different episodes; they will not be compared with earlier "
                    "evaluations",
                    " and ".join(others),
                )
            return
        if self.best is not None and _fits(best, self.best.criterion, "checkpoint.keep_best"):
            self.best.step, self.best.value = best["step"], best["value"]
        watch = self.early_stopping
        if watch is not None and _fits(stopping, watch.rule, "orchestrator.eval.early_stopping"):
            watch.best, watch.best_step, watch.since = stopping["best"], stopping["best_step"], list(stopping["since"])


def _fits(state: Mapping[str, Any] | None, criterion: CriterionConfig, where: str) -> TypeGuard[Mapping[str, Any]]:
    if state is None:
        return False
    if any(state.get(name) != value for name, value in _named(criterion).items()):
        logger.warning("%s has changed, so evaluations will not be compared with earlier ones", where)
        return False
    return True
