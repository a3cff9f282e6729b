"""Runs the alarms. Keeps the window of the run that the conditions read, turns the results of the conditions into
findings with the texts of the table, and raises and clears each alarm once."""

from __future__ import annotations

import dataclasses
import logging
import math
import string
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import ComponentError
from verbatim.core.redaction import without_secrets
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms.figures import error_counts, rollout_figures
from verbatim.logs.monitors.alarms.rule import HOLD, Figures, Finding, Rule, Sight, StepFigures, Window, training_before

logger = logging.getLogger(__name__)

KEPT_STEPS, KEPT_FIRST, KEPT_EVALUATIONS = 48, 16, 32
"""Maximum number of latest steps, of first steps, and of evaluations per environment in a window."""
TRAINING_STEPS = 5
"""Number of training steps with which an evaluation is compared."""
CLEAR_AFTER = 5
"""Number of consecutive steps without a finding after which an alarm is cleared. A rule may override this number."""
_SHOWN = 5
"""Maximum number of trajectories that a finding names."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """One cause of an alarm, with the advice for it."""

    cause: str
    """The most common cause of the observation."""
    advice: str
    """The key to change, and what to try."""
    seen: str = ""
    """The text that replaces `{seen}` in the alarm's message."""


@dataclass(frozen=True, kw_only=True)
class AlarmRow:
    """An alarm in the table `ALARMS`, that is, a rule written as data. `_Texts` fills in the placeholders of its
    texts."""

    name: str
    """Name of the alarm, and of its configuration table, [monitor.alarms.NAME]."""
    function: Callable[..., Iterable[Sight]]
    """The condition, called as `function(window, **parameters)`. Its keyword arguments are the parameters."""
    parameters: Mapping[str, Any]
    """Default thresholds and window lengths."""
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By parameter name, the smallest and the largest value with which the alarm can be raised at all."""
    message: str
    """One sentence that says what was observed, with placeholders for the numbers."""
    why: Mapping[str, Why] | Why
    """Cause and advice. If there are several, they are chosen by `Sight.why`, with "" as the fallback."""
    evidence: Sequence[str] = ()
    """Metrics of the step that show the problem."""
    trajectories: Callable[[Sequence[TrajectoryOutcome], Sight], Sequence[TrajectoryOutcome]] | None = None
    """Selects the outcomes that show the problem, among the outcomes of the sight's environment, or of the whole run if
    the sight has no environment. The alarm names the first of them."""
    on_evaluations: bool = False
    """True if the alarm is checked after each evaluation instead of after each step."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """The findings in a window."""
        for sight in self.function(window, **self.parameters):
            why = self.why if isinstance(self.why, Why) else self.why.get(sight.why) or self.why[""]
            texts = _Texts(window, {**self.parameters, **sight.evidence, **sight.values, "env": sight.env})
            metrics = {name: value for name in self.evidence if (value := window.metric(name)) is not None}
            own = [outcome for outcome in window.outcomes if sight.env in (None, outcome.trajectory.env)]
            shown = self.trajectories(own, sight) if self.trajectories is not None and sight.level >= 1 else ()
            yield Finding(
                message=texts.format(self.message, seen=texts.format(why.seen)),
                cause=texts.format(why.cause),
                advice=texts.format(why.advice),
                level=sight.level,
                evidence={**metrics, **sight.evidence},
                env=sight.env,
                trajectory_ids=tuple(outcome.trajectory.trajectory_id for outcome in shown[:_SHOWN]),
            )


class _Texts(string.Formatter):
    """Fills the placeholders of texts. A placeholder is the name of one of the values, or of a metric of the step. A
    name with a dot that is not one of the values is a configuration key, which is shown with its current value.

    >>> window = Window(steps=[StepFigures(step=1, metrics={"time/step": 2.5})], config={"trainer": {"lr": 0.1}})
    >>> _Texts(window, {"share": 0.25}).format("{share:.0%} of {time/step:.1f} s; lower {trainer.lr}")
    '25% of 2.5 s; lower trainer.lr (now 0.1)'
    """

    def __init__(self, window: Window, values: Mapping[str, Any]) -> None:
        self._window, self._values = window, values

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values = {**self._values, **kwargs}
        read = self._window.now if "." in field_name else self._window.metric
        return values[field_name] if field_name in values else read(field_name), field_name


@dataclass(kw_only=True)
class _Raised:
    """An alarm that has been raised and not yet cleared. The fields have the same meaning as in `Alarm`."""

    name: str
    env: str | None
    step: int
    advice: str
    cause: str
    calm: int = 0
    """Number of consecutive calls without a finding of level `HOLD` or more."""


class AlarmWatch:
    """Calls the rules after each step or evaluation, and returns the alarms that are raised and cleared.

    There is one alarm for each rule and environment. It is raised at the first finding of level 1 or more, and cleared
    after `clear_after` consecutive calls of the rule without a finding of level `HOLD` or more. In between it is not
    repeated.

    Args:
        rules: The rules by alarm name.
        config: The run's configuration as plain values, for advice.
        stop: Names of alarms that end the run.
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
        """Called when an alarm that ends the run is raised."""

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> list[Alarm]:
        """The alarms that a step raises and clears."""
        figures = StepFigures(
            step=step,
            metrics=_finite(metrics),
            errors=error_counts(outcomes),
            envs={env: _finite(own) for env, own in rollout_figures(metrics, outcomes).items()},
        )
        return self.observe(figures, outcomes)

    def observe(self, figures: StepFigures, outcomes: Sequence[TrajectoryOutcome] = ()) -> list[Alarm]:
        """Like `on_step`, but with figures that are already computed, for example to replay a recorded run."""
        self._steps.append(figures)
        if len(self._first) < KEPT_FIRST:
            self._first.append(figures)
        return self._judge(figures.step, outcomes)

    def on_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms that an evaluation raises and clears."""
        kept = self._evaluations.setdefault(env, deque(maxlen=KEPT_EVALUATIONS))
        kept.append((step, {**_finite(metrics), **training_before(list(self._steps)[-TRAINING_STEPS:], env)}))
        return self._judge(step, evaluated=env)

    def _judge(
        self, step: int, outcomes: Sequence[TrajectoryOutcome] = (), *, evaluated: str | None = None
    ) -> list[Alarm]:
        """Call the rules for steps, or for evaluations if `evaluated` is an environment. Returns the resulting
        alarms."""
        window = Window(
            steps=tuple(self._steps),
            first=tuple(self._first),
            outcomes=outcomes,
            config=self._config,
            evaluations={name: tuple(kept) for name, kept in self._evaluations.items()},
        )
        alarms: list[Alarm] = []
        for name, rule in self._rules.items():
            is_asked = bool(getattr(rule, "on_evaluations", False)) is (evaluated is not None)
            found = self._ask(name, rule, window) if is_asked else None
            if found is not None:
                alarms += self._compare(name, step, {finding.env: finding for finding in found}, evaluated)
        return alarms

    def _ask(self, name: str, rule: Rule, window: Window) -> list[Finding] | None:
        """Call a rule. If it raises an exception or returns an invalid value, this is logged once and the result is
        None, so that no alarm is raised or cleared."""
        try:
            found = rule(window)
            findings = [found] if isinstance(found, Finding) else list(found or ())
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
        self, name: str, step: int, findings: Mapping[str | None, Finding], evaluated: str | None
    ) -> Iterator[Alarm]:
        """The alarms that the findings of one rule raise and clear."""
        envs = [env for kind, env in self._raised if kind == name]
        for env in dict.fromkeys([*findings, *envs]):
            found, raised = findings.get(env), self._raised.get((name, env))
            if raised is None:
                if found is not None and found.level >= 1:
                    yield self._raise(name, step, found)
            elif found is not None and found.level >= HOLD:
                raised.calm = 0
            elif env == evaluated if evaluated is not None else not self._is_absent(env):
                raised.calm += 1
                if raised.calm >= getattr(self._rules[name], "clear_after", CLEAR_AFTER if evaluated is None else 1):
                    del self._raised[name, env]
                    yield Alarm(
                        name=name,
                        step=step,
                        state="cleared",
                        cause=raised.cause,
                        advice=raised.advice,
                        env=env,
                        message=f"the problem reported at step {raised.step} is no longer seen",
                    )

    def _raise(self, name: str, step: int, found: Finding) -> Alarm:
        """Raise an alarm. Secrets are removed, because the texts may quote errors of environments and are sent to
        services."""
        message, cause, advice = (without_secrets(str(text)) for text in (found.message, found.cause, found.advice))
        self._raised[name, found.env] = _Raised(name=name, env=found.env, step=step, advice=advice, cause=cause)
        alarm = Alarm(
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
        if self.on_stop is not None and name in self._stop:
            self.on_stop(alarm)
        return alarm

    def _is_absent(self, env: str | None) -> bool:
        """True if the latest step has rollouts, but no rollouts of this environment. The environment's alarms then keep
        their state."""
        return env is not None and bool(self._steps) and bool(self._steps[-1].envs) and env not in self._steps[-1].envs

    def state_dict(self) -> dict[str, Any]:
        """The window and the raised alarms, as plain JSON values."""
        return {
            "first": _columns(self._first),
            "steps": _columns(self._steps),
            "evaluations": {env: [list(each) for each in kept] for env, kept in self._evaluations.items()},
            "raised": [dataclasses.asdict(raised) for raised in self._raised.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`. Raised alarms whose rules no longer exist are dropped."""
        self._first = _rows(state["first"])
        self._steps = deque(_rows(state["steps"]), maxlen=KEPT_STEPS)
        self._evaluations = {
            env: deque(((step, metrics) for step, metrics in kept), maxlen=KEPT_EVALUATIONS)
            for env, kept in state["evaluations"].items()
        }
        self._raised = {
            (each["name"], each["env"]): _Raised(**each) for each in state["raised"] if each["name"] in self._rules
        }


def _columns(steps: Collection[StepFigures]) -> dict[str, Any]:
    """Convert steps to columns, so that each name is stored once. A value of None means that the step has no such
    figure."""
    envs = dict.fromkeys(env for figures in steps for env in figures.envs)
    return {
        "step": [figures.step for figures in steps],
        "metrics": _column([figures.metrics for figures in steps]),
        "envs": {env: _column([figures.of(env) for figures in steps]) for env in envs},
        "errors": [figures.errors for figures in steps],
    }


def _column(rows: Sequence[Figures]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(columns: Mapping[str, Any]) -> list[StepFigures]:
    """The inverse of `_columns`."""
    return [
        StepFigures(
            step=step,
            metrics=_row(columns["metrics"], index),
            errors=columns["errors"][index],
            envs={env: own for env, named in columns["envs"].items() if (own := _row(named, index))},
        )
        for index, step in enumerate(columns["step"])
    ]


def _row(columns: Mapping[str, Sequence[float | None]], index: int) -> dict[str, float]:
    return {name: value for name, values in columns.items() if (value := values[index]) is not None}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite values, rounded to six digits as in checkpoints, so that a resumed run sees the same values."""
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if math.isfinite(value)}
