"""Watches a run: keeps the window that the rules read, and turns their findings into alarms that are raised once and
cleared once."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.core.errors import ComponentError
from verbatim.core.redaction import without_secrets
from verbatim.core.trajectories import Fate
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms.base import HOLD, Figures, Finding, Rule, StepFigures, Window, training_before
from verbatim.logs.monitors.alarms.figures import error_counts, rollout_figures

logger = logging.getLogger(__name__)

KEPT_STEPS, KEPT_FIRST, KEPT_EVALUATIONS = 48, 16, 32
"""What a window holds: latest steps, first steps, evaluations of each environment."""
TRAINING_STEPS = 5
"""Steps of training that an evaluation is compared with."""
CLEAR_AFTER = 5
"""Calls in a row that find nothing, until an alarm is cleared; a rule may say otherwise."""


@dataclass(kw_only=True)
class _Raised:
    """An alarm that has been raised and not cleared."""

    step: int
    advice: str
    cause: str
    calm: int = 0
    """Calls in a row that have not found it."""


class AlarmWatch:
    """Calls every rule after each step or evaluation, and says which alarms are raised and cleared by it.

    An alarm, of one rule and one environment, is raised at the first finding of level 1, and cleared when its rule has
    found no level of `HOLD` or more for its `clear_after` calls in a row. Between the two it is silent.

    Args:
        rules: By the names of their alarms.
        config: The run's configuration as plain values, for advice.
        stop: The names of the alarms that end the run.
    """

    def __init__(
        self, rules: Mapping[str, Rule], *, config: Mapping[str, Any] | None = None, stop: Collection[str] = ()
    ) -> None:
        self._rules, self._config, self._stop = dict(rules), config or {}, frozenset(stop)
        self._steps: deque[StepFigures] = deque(maxlen=KEPT_STEPS)
        self._first: list[StepFigures] = []
        self._evaluations: dict[str, deque[tuple[int, Figures]]] = {}
        self._raised: dict[tuple[str, str | None], _Raised] = {}
        self._failed: set[str] = set()
        self.on_stop: Callable[[Alarm], None] | None = None
        """Is called with each alarm that is to end the run, as it is raised."""

    def on_step(self, step: int, metrics: Mapping[str, float], fates: Sequence[Fate]) -> list[Alarm]:
        """What this step raises and clears."""
        figures = StepFigures(
            step=step,
            metrics=_finite(metrics),
            errors=error_counts(fates),
            envs={env: _finite(own) for env, own in rollout_figures(metrics, fates).items()},
        )
        return self.observe(figures, fates)

    def observe(self, figures: StepFigures, fates: Sequence[Fate] = ()) -> list[Alarm]:
        """The same of figures that are known already."""
        self._steps.append(figures)
        if len(self._first) < KEPT_FIRST:
            self._first.append(figures)
        return self._judge(figures.step, lambda rule: not getattr(rule, "on_evaluations", False), fates)

    def on_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> list[Alarm]:
        """What this evaluation raises and clears."""
        kept = self._evaluations.setdefault(env, deque(maxlen=KEPT_EVALUATIONS))
        kept.append((step, {**_finite(metrics), **self._training(env)}))
        return self._judge(step, lambda rule: getattr(rule, "on_evaluations", False), (), env)

    def _training(self, env: str) -> dict[str, float]:
        """What training is like as an evaluation begins: of the same environment, or of all where it is not trained."""
        return training_before(list(self._steps)[-TRAINING_STEPS:], env)

    def _judge(
        self, step: int, is_asked: Callable[[Rule], bool], fates: Sequence[Fate], env: str | None = None
    ) -> list[Alarm]:
        """The alarms of the rules that are asked now; after an evaluation only those about its environment."""
        window = Window(
            steps=tuple(self._steps),
            first=tuple(self._first),
            fates=fates,
            config=self._config,
            evaluations={name: tuple(kept) for name, kept in self._evaluations.items()},
        )
        alarms: list[Alarm] = []
        for name, rule in self._rules.items():
            if is_asked(rule):
                found = self._ask(name, rule, window)
                if found is None:
                    continue
                findings = {finding.env: finding for finding in found}
                patience = int(getattr(rule, "clear_after", CLEAR_AFTER))
                alarms += self._compare(name, step, findings, patience, env)
        for alarm in alarms:
            if self.on_stop is not None and alarm.state == "raised" and alarm.name in self._stop:
                self.on_stop(alarm)
        return alarms

    def _ask(self, name: str, rule: Rule, window: Window) -> list[Finding] | None:
        """A rule that raises an exception, or returns something else, is reported once; None, so that it neither raises
        nor clears an alarm."""
        try:
            found = rule(window)
            findings = _listed(found)
            wrong = next((finding for finding in findings if not isinstance(finding, Finding)), None)
            if wrong is not None:
                raise ComponentError(f"it returned {type(wrong).__name__}, expected Finding, a list of them, or None")
        except Exception:
            if name not in self._failed:
                logger.exception("alarm %s failed; the run goes on, and this is not reported again", name)
            self._failed.add(name)
            return None
        return findings

    def _compare(
        self, name: str, step: int, findings: Mapping[str | None, Finding], patience: int, only: str | None
    ) -> list[Alarm]:
        alarms = []
        for env, found in findings.items():
            raised = self._raised.get((name, env))
            if raised is not None and found.level >= HOLD:
                raised.calm = 0
            elif raised is None and found.level >= 1:
                alarm = _alarm(name, step, found)
                self._raised[name, env] = _Raised(step=step, advice=alarm.advice, cause=alarm.cause)
                alarms.append(alarm)
        for (kind, env), raised in list(self._raised.items()):
            still = env in findings and findings[env].level >= HOLD
            if kind != name or still or (env != only if only is not None else self._is_absent(env)):
                continue
            raised.calm += 1
            if raised.calm >= patience:
                del self._raised[kind, env]
                alarms.append(_cleared(name, step, env, raised))
        return alarms

    def _is_absent(self, env: str | None) -> bool:
        """Whether the step at hand says nothing about an environment."""
        return env is not None and bool(self._steps) and bool(self._steps[-1].envs) and env not in self._steps[-1].envs

    def state_dict(self) -> dict[str, Any]:
        """The window and what is raised, as plain JSON values."""
        return {
            "first": _columns(self._first),
            "steps": _columns(self._steps),
            "evaluations": {env: [list(each) for each in kept] for env, kept in self._evaluations.items()},
            "raised": [
                {"name": name, "env": env, **dataclasses.asdict(raised)} for (name, env), raised in self._raised.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. What is raised of rules that are no longer there is forgotten."""
        self._first = _rows(state["first"])
        self._steps = deque(_rows(state["steps"]), maxlen=KEPT_STEPS)
        self._evaluations = {
            env: deque(((step, metrics) for step, metrics in kept), maxlen=KEPT_EVALUATIONS)
            for env, kept in state["evaluations"].items()
        }
        self._raised = {}
        for entry in state["raised"]:
            fields = dict(entry)
            name, env = fields.pop("name"), fields.pop("env")
            if name in self._rules:
                self._raised[name, env] = _Raised(**fields)


def _columns(steps: Collection[StepFigures]) -> dict[str, Any]:
    """Steps as columns, in which each name stands once; None where a step has no such figure."""
    envs = dict.fromkeys(env for figures in steps for env in figures.envs)
    return {
        "step": [figures.step for figures in steps],
        "metrics": _column([figures.metrics for figures in steps]),
        "envs": {env: _column([figures.envs.get(env, {}) for figures in steps]) for env in envs},
        "errors": [figures.errors for figures in steps],
    }


def _column(rows: Sequence[Figures]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(columns: Mapping[str, Any]) -> list[StepFigures]:
    """The inverse of `_columns`."""
    envs = columns["envs"]
    return [
        StepFigures(
            step=step,
            metrics=_row(columns["metrics"], index),
            errors=columns["errors"][index],
            envs={env: own for env in envs if (own := _row(envs[env], index))},
        )
        for index, step in enumerate(columns["step"])
    ]


def _row(columns: Mapping[str, Sequence[float | None]], index: int) -> dict[str, float]:
    return {name: value for name, values in columns.items() if (value := values[index]) is not None}


def _listed(found: Iterable[Finding] | Finding | None) -> list[Finding]:
    if found is None:
        return []
    return [found] if isinstance(found, Finding) else list(found)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """To six digits, which is what a checkpoint keeps: a resumed run sees the same."""
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if math.isfinite(value)}


def _alarm(name: str, step: int, found: Finding) -> Alarm:
    """Its texts may quote errors of environments, and go to services: they are without secrets."""
    message, cause, advice = (without_secrets(str(text)) for text in (found.message, found.cause, found.advice))
    return Alarm(
        name=name,
        step=step,
        state="raised",
        message=message,
        cause=cause,
        advice=advice,
        evidence=dict(found.evidence),
        env=found.env,
        trajectory_ids=found.trajectory_ids,
    )


def _cleared(name: str, step: int, env: str | None, raised: _Raised) -> Alarm:
    return Alarm(
        name=name,
        step=step,
        state="cleared",
        cause=raised.cause,
        advice=raised.advice,
        env=env,
        message=f"what was raised at step {raised.step} is no longer seen",
    )
