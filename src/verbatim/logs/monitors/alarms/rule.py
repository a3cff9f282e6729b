"""Defines the protocol of alarm rules, which read a window of the run's steps and return findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verbatim.core.trajectories import TrajectoryOutcome

Figures = Mapping[str, float]
"""Finite values by name."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Metrics and figures of one step."""

    step: int
    """Number of steps done."""
    metrics: Figures
    """The step's metrics, without metrics that are NaN or infinite."""
    envs: Mapping[str, Figures] = field(default_factory=dict)
    """Figures of the rollouts by environment, as returned by `rollout_figures`."""
    errors: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of failed rollouts, by environment and kind of error."""

    def of(self, env: str | None) -> Figures:
        """The figures of an environment (empty if it has no rollouts), or the step's metrics if `env` is None."""
        return self.metrics if env is None else self.envs.get(env, {})


@dataclass(frozen=True, kw_only=True)
class Window:
    """The latest steps, the first steps and the evaluations of a run, as of the latest step.

    Example: reading the metric `loss` of three steps.

        >>> steps = [StepFigures(step=n, metrics={"loss": 1.0 / n}) for n in (1, 2, 4)]
        >>> window = Window(steps=steps)
        >>> window.step, window.recent("loss", 2), window.median("loss", 2)
        (4, [0.5, 0.25], 0.375)
        >>> window.recent("loss", 4), window.median("loss", 4)
        ([], None)
    """

    steps: Sequence[StepFigures]
    """The latest steps, at most 48, oldest first."""
    first: Sequence[StepFigures] = ()
    """The first steps of the run, at most 16, oldest first."""
    evaluations: Mapping[str, Sequence[tuple[int, Figures]]] = field(default_factory=dict)
    """Step and metrics of each evaluation by environment, at most 32, oldest first. The metrics include training
    success in the five steps before the evaluation (`TRAINING`) and its standard error (`TRAINING_ERROR`)."""
    outcomes: Sequence[TrajectoryOutcome] = ()
    """Outcomes of the latest step: the trajectories of its batch, and the trajectories that were dropped before the
    batch was built."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration as plain values, without secrets."""

    @property
    def step(self) -> int:
        """Number of steps done; 0 before the first step."""
        return self.steps[-1].step if self.steps else 0

    @property
    def envs(self) -> list[str]:
        """The environments that have figures in the window."""
        return list(dict.fromkeys(env for figures in self.steps for env in figures.envs))

    def metric(self, name: str, env: str | None = None) -> float | None:
        """A metric of the latest step, or a figure of an environment in that step; None if it has no finite value."""
        return self.steps[-1].of(env).get(name) if self.steps else None

    def recent(self, name: str, count: int, env: str | None = None, *, missing: float | None = None) -> list[float]:
        """The values of a metric in the last `count` steps, oldest first. Empty if the window has fewer steps, or if
        fewer than half of them have a value. If `env` is given, only steps with rollouts of that environment count, and
        `missing` replaces a figure that such a step lacks."""
        return [value for (value,) in self.together((name,), count, env, missing=missing)]

    def together(
        self, names: Sequence[str], count: int, env: str | None = None, *, missing: float | None = None
    ) -> list[tuple[float, ...]]:
        """Like `recent`, but for several metrics: the values in the last `count` steps, without steps that lack one of
        the metrics.

        Example: of the steps {"a": 1, "b": 2}, {"a": 3} and {"a": 5, "b": 6} the first and the last have both a and b:
        [(1, 2), (5, 6)].
        """
        return _rows(_having(self.steps, env)[-count:], names, count, env, missing)

    def median(self, name: str, count: int, env: str | None = None) -> float | None:
        """The median of `recent`; None if there are no values."""
        return median(self.recent(name, count, env))

    def median_at_first(self, name: str, count: int, env: str | None = None) -> float | None:
        """The median of the values in the run's first `count` steps; None if there are no values."""
        return median([own[name] for step in _having(self.first, env)[:count] if name in (own := step.of(env))])

    def earlier(
        self, name: str, count: int, env: str | None = None, *, missing: float | None = None
    ) -> list[list[float]]:
        """The values to compare `recent` with: the values of the run's first `count` steps, and the values of the
        `count` steps that end `4 * count` steps before the recent steps, or as far back as the window goes. Empty until
        the run has `2 * count` steps, so that no step is both recent and earlier."""
        return [[value for (value,) in rows] for rows in self.earlier_together((name,), count, env, missing=missing)]

    def earlier_together(
        self, names: Sequence[str], count: int, env: str | None = None, *, missing: float | None = None
    ) -> list[list[tuple[float, ...]]]:
        """Like `earlier`, but for several metrics: the values to compare `together` with.

        Example: "b" has no value in the run's first step, so the values of both metrics are only from later steps.

            >>> figures = [{"a": 1.0}, {"a": 2.0, "b": 3.0}, {"a": 4.0, "b": 5.0}]
            >>> steps = [StepFigures(step=n, metrics=metrics) for n, metrics in enumerate(figures)]
            >>> window = Window(steps=steps[1:], first=steps)
            >>> window.earlier("a", 1), window.earlier("b", 1)
            ([[1.0], [2.0]], [[3.0]])
            >>> window.earlier_together(("a", "b"), 1)
            [[(2.0, 3.0)]]
        """
        own, first = _having(self.steps, env), _having(self.first, env)
        if len(own) < count:
            return []
        before, newest = own[:-count], own[-count].step
        end = max(count, len(before) - 4 * count)
        stretches = [[step for step in own if step.step < newest] for own in (first[:count], before[end - count : end])]
        started, later = (_rows(steps, names, count, env, missing) for steps in stretches)
        return [rows for rows in ([started] if started == later else [started, later]) if rows]

    def setting(self, key: str) -> Any:
        """The value of a configuration key such as "trainer.optim.lr"; None if it is not set."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def now(self, key: str) -> str:
        """A configuration key with its current value, for advice.

        >>> Window(steps=[], config={"trainer": {"optim": {"lr": 0.0008}}}).now("trainer.optim.lr")
        'trainer.optim.lr (now 0.0008)'
        """
        value = self.setting(key)
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"{key} (not set)" if value is None else f"{key} (now {shown})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a rule for one step, about one environment or the whole run."""

    message: str
    """One sentence that says what was observed, with the numbers."""
    cause: str
    """The most common cause."""
    advice: str
    """The key to change, with its current value (`Window.now`), and what to try."""
    level: float = 1.0
    """The value relative to the threshold. At 1 or more the alarm is raised. At `HOLD` or more, a raised alarm is not
    cleared."""
    evidence: Figures = field(default_factory=dict)
    """Metrics that show the problem, by name."""
    env: str | None = None
    """The environment with the problem; None for the whole run."""
    trajectory_ids: tuple[str, ...] = ()
    """Trajectories of this step that show the problem."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The result of a condition in `ALARMS` for one step: a `Finding` without its texts."""

    level: float
    """Same as `Finding.level`."""
    env: str | None = None
    """Same as `Finding.env`."""
    why: str = ""
    """Key in `AlarmRow.why` of the cause that applies."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values for the placeholders of the texts, in addition to parameters and evidence."""
    evidence: Figures = field(default_factory=dict)
    """Figures that show the problem, in addition to `AlarmRow.evidence`."""


TRAINING, TRAINING_ERROR = "training/success", "training/success_error"
"""Names of training success and its standard error in an evaluation's metrics."""
TOOL, UNTRAINED = "tool/", "untrained/"
"""Prefixes of figures: the calls of a tool, by its name, and the rollouts that were not trained, by the reason."""
HOLD = 0.7
"""The level below which a raised alarm can be cleared. It is below 1, so that a value that fluctuates around the
threshold raises the alarm only once."""


class Rule(Protocol):
    """The condition of one alarm: a function, or a frozen dataclass whose fields are the parameters. It is stateless.

    A rule is called after each step, or after each evaluation if it has the attribute `on_evaluations = True`. Its
    attribute `clear_after` (by default 5 steps, or 1 evaluation) is the number of consecutive calls with a level below
    `HOLD` after which the alarm is cleared.
    """

    def __call__(self, window: Window, /) -> Iterable[Finding] | Finding | None:
        """The findings in a window: at most one per environment, and at most one for the whole run."""


def training_before(steps: Sequence[StepFigures], env: str) -> dict[str, float]:
    """`TRAINING` and `TRAINING_ERROR` of these steps, for this environment, or for all environments if this environment
    is not trained.

    The error is the larger of two estimates: the standard error of the mean over the steps, and the standard error of a
    share of all rollouts in these steps. Example: successes of 0.4 and 0.6 in two steps of 50 rollouts give 0.5, with
    an error of max(0.1 / sqrt(2), sqrt(0.25 / 100)) = 0.071.
    """
    for name in (f"success/{env}", "success"):
        if values := [figures.metrics[name] for figures in steps if name in figures.metrics]:
            mean = statistics.fmean(values)
            completed = sum(figures.of(env).get("completed", 0.0) for figures in steps)
            count = completed or sum(figures.metrics.get("rollouts", 0.0) for figures in steps)
            error = max(statistics.pstdev(values) / math.sqrt(len(values)), error_of_share(mean, count))
            return {TRAINING: mean, TRAINING_ERROR: error}
    return {}


def error_of_share(share: float, count: float) -> float:
    """The standard error of a share of `count` items."""
    # One success and one failure are added, so that the error of a share of 0 or 1 is not 0.
    count = max(1.0, count)
    rounded = (share * count + 1) / (count + 2)
    return math.sqrt(rounded * (1 - rounded) / count)


def over(value: float, bound: float) -> float:
    """The ratio of a value to its bound; 1 if they are equal. A bound of 0 does not cause a division by zero."""
    return value / max(bound, 1e-9)


def median(values: Sequence[float]) -> float | None:
    """The median; None if there are no values."""
    return statistics.median(values) if values else None


def _having(steps: Sequence[StepFigures], env: str | None) -> Sequence[StepFigures]:
    """The steps with rollouts of an environment, or all steps if `env` is None."""
    return [figures for figures in steps if env is None or env in figures.envs]


def _rows(
    steps: Sequence[StepFigures], names: Sequence[str], count: int, env: str | None, missing: float | None
) -> list[tuple[float, ...]]:
    """The values of the steps that have a value for each name. Empty if there are fewer than `count` steps, or if fewer
    than half of `count` steps have all these values."""
    rows: list[tuple[Any, ...]] = [tuple(own.of(env).get(name, missing) for name in names) for own in steps]
    found = [row for row in rows if None not in row]
    return found if len(steps) >= count and 2 * len(found) >= count else []
