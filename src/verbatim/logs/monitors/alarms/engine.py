"""Judges the alarms: turns a row of the table and what its condition sees into a finding, keeps the window of the run
that conditions read, and raises each alarm once and clears it once."""

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
"""What a window holds: latest steps, first steps, evaluations of each environment."""
TRAINING_STEPS = 5
"""Steps of training that an evaluation is compared with."""
CLEAR_AFTER = 5
"""Steps in a row that find nothing, until an alarm is cleared; a rule may say otherwise."""
_SHOWN = 5
"""Trajectories that a finding names."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """One cause of an alarm."""

    cause: str
    """What most often causes what is seen."""
    advice: str
    """The key to change, and what to try."""
    seen: str = ""
    """What stands for `{seen}` in the alarm's message."""


@dataclass(frozen=True, kw_only=True)
class AlarmRow:
    """An alarm of the table `ALARMS`: a rule as data. The texts are filled by `_Texts`."""

    name: str
    """Its table is [monitor.alarms.NAME]."""
    function: Callable[..., Iterable[Sight]]
    """The condition: `function(window, **parameters)`; its keyword arguments are the parameters."""
    parameters: Mapping[str, Any]
    """Thresholds, and lengths of windows."""
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The smallest and the largest value of a parameter with which the alarm can be raised."""
    message: str
    """One sentence: what is seen, with its numbers."""
    why: Mapping[str, Why] | Why
    """Cause and advice; by `Sight.why` where there are several, with "" for every other one."""
    evidence: Sequence[str] = ()
    """Metrics of the step that show it."""
    trajectories: Callable[[Sequence[TrajectoryOutcome], Sight], Sequence[TrajectoryOutcome]] | None = None
    """Which outcomes show it, of those of the sight's environment or of the run; the first ones are named."""
    on_evaluations: bool = False
    """Whether it is looked for after each evaluation, and not after each step."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the window shows."""
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
    """Fills texts. A name with a dot is a key of the configuration, which is shown with its present value; one that is
    not among the values is a metric of the step.

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
    """An alarm that has been raised and not cleared."""

    name: str
    env: str | None
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

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> list[Alarm]:
        """What this step raises and clears."""
        figures = StepFigures(
            step=step,
            metrics=_finite(metrics),
            errors=error_counts(outcomes),
            envs={env: _finite(own) for env, own in rollout_figures(metrics, outcomes).items()},
        )
        return self.observe(figures, outcomes)

    def observe(self, figures: StepFigures, outcomes: Sequence[TrajectoryOutcome] = ()) -> list[Alarm]:
        """The same of figures that are known already."""
        self._steps.append(figures)
        if len(self._first) < KEPT_FIRST:
            self._first.append(figures)
        return self._judge(figures.step, outcomes)

    def on_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> list[Alarm]:
        """What this evaluation raises and clears."""
        kept = self._evaluations.setdefault(env, deque(maxlen=KEPT_EVALUATIONS))
        kept.append((step, {**_finite(metrics), **training_before(list(self._steps)[-TRAINING_STEPS:], env)}))
        return self._judge(step, evaluated=env)

    def _judge(
        self, step: int, outcomes: Sequence[TrajectoryOutcome] = (), *, evaluated: str | None = None
    ) -> list[Alarm]:
        """The alarms of the rules that are asked now; after an evaluation only those about its environment."""
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
        """A rule that raises an exception, or returns something else, is reported once; None, so that it neither raises
        nor clears an alarm."""
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
        """The alarms of one rule that these findings raise and clear."""
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
                        message=f"what was raised at step {raised.step} is no longer seen",
                    )

    def _raise(self, name: str, step: int, found: Finding) -> Alarm:
        """Its texts may quote errors of environments, and go to services: they are without secrets."""
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
        """Whether the step at hand says nothing about an environment."""
        return env is not None and bool(self._steps) and bool(self._steps[-1].envs) and env not in self._steps[-1].envs

    def state_dict(self) -> dict[str, Any]:
        """The window and what is raised, as plain JSON values."""
        return {
            "first": _columns(self._first),
            "steps": _columns(self._steps),
            "evaluations": {env: [list(each) for each in kept] for env, kept in self._evaluations.items()},
            "raised": [dataclasses.asdict(raised) for raised in self._raised.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. What is raised of rules that are no longer there is forgotten."""
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
    """Steps as columns, in which each name stands once; None where a step has no such figure."""
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
    """To six digits, which is what a checkpoint keeps: a resumed run sees the same."""
    return {name: float(f"{value:.6g}") for name, value in metrics.items() if math.isfinite(value)}
