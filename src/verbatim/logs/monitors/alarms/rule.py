"""Defines what an alarm's rule reads, a window of the run's steps, and what it returns, findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verbatim.core.trajectories import TrajectoryOutcome

Figures = Mapping[str, float]
"""Name to value; finite values only."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What one step was like."""

    step: int
    """Steps done."""
    metrics: Figures
    """The step's metrics; those that are NaN or infinite are left out."""
    envs: Mapping[str, Figures] = field(default_factory=dict)
    """Figures of each environment's rollouts, as `rollout_figures` makes them."""
    errors: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Failed rollouts of each environment, by kind of error."""

    def of(self, env: str | None) -> Figures:
        """The figures of an environment, empty where it has no rollouts; the step's metrics for None."""
        return self.metrics if env is None else self.envs.get(env, {})


@dataclass(frozen=True, kw_only=True)
class Window:
    """The latest steps of a run, the first ones, and its evaluations, as they are after the step at hand.

    Example: the metric `loss` of three steps, read as a rule reads it.

        >>> steps = [StepFigures(step=n, metrics={"loss": 1.0 / n}) for n in (1, 2, 4)]
        >>> window = Window(steps=steps)
        >>> window.step, window.recent("loss", 2), window.median("loss", 2)
        (4, [0.5, 0.25], 0.375)
        >>> window.recent("loss", 4), window.median("loss", 4)
        ([], None)
    """

    steps: Sequence[StepFigures]
    """The latest steps, oldest first; the last one is the step at hand. At most 48."""
    first: Sequence[StepFigures] = ()
    """The first steps of the run, oldest first. At most 16."""
    evaluations: Mapping[str, Sequence[tuple[int, Figures]]] = field(default_factory=dict)
    """By environment: step and metrics of each evaluation, oldest first, at most 32; with the success of training in
    the five steps before it, `TRAINING`, and its standard error, `TRAINING_ERROR`."""
    outcomes: Sequence[TrajectoryOutcome] = ()
    """Those of the step at hand: of its batch, and of what was dropped before it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration as plain values, without secrets."""

    @property
    def step(self) -> int:
        """Steps done; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def envs(self) -> list[str]:
        """The environments that have figures in the window."""
        return list(dict.fromkeys(env for figures in self.steps for env in figures.envs))

    def metric(self, name: str, env: str | None = None) -> float | None:
        """A metric of the step at hand, or a figure of an environment; None where it has no finite value."""
        return self.steps[-1].of(env).get(name) if self.steps else None

    def recent(self, name: str, count: int, env: str | None = None, *, missing: float | None = None) -> list[float]:
        """The values of the last `count` steps, oldest first; empty where fewer than half of the steps have one, or the
        window has fewer steps. With an environment, of the last steps that have rollouts of it; `missing` stands for a
        figure that it does not have there."""
        return [value for (value,) in self.together((name,), count, env, missing=missing)]

    def together(
        self, names: Sequence[str], count: int, env: str | None = None, *, missing: float | None = None
    ) -> list[tuple[float, ...]]:
        """The values of several metrics in the steps, of the last `count`, that have all of them; as `recent` else.

        Example: of the steps {"a": 1, "b": 2}, {"a": 3} and {"a": 5, "b": 6} the metrics a and b are together in the
        first and the last: [(1, 2), (5, 6)].
        """
        return _rows(_having(self.steps, env)[-count:], names, count, env, missing)

    def median(self, name: str, count: int, env: str | None = None) -> float | None:
        """The median of `recent`; None where that is empty."""
        return median(self.recent(name, count, env))

    def median_at_first(self, name: str, count: int, env: str | None = None) -> float | None:
        """The median of the values that the run's first `count` steps have; None where they have none."""
        return median([own[name] for step in _having(self.first, env)[:count] if name in (own := step.of(env))])

    def earlier(
        self, name: str, count: int, env: str | None = None, *, missing: float | None = None
    ) -> list[list[float]]:
        """What `recent` is compared with: the values of the run's first `count` steps, and of the `count` steps that
        ended `4 * count` steps before the recent ones, or as far back as the window goes. Empty before the run has
        `2 * count` steps; steps are never both recent and earlier."""
        return [[value for (value,) in rows] for rows in self.earlier_together((name,), count, env, missing=missing)]

    def earlier_together(
        self, names: Sequence[str], count: int, env: str | None = None, *, missing: float | None = None
    ) -> list[list[tuple[float, ...]]]:
        """What `together` is compared with: `earlier` of several metrics.

        Example: where "b" has no values in the run's first steps, and "a" has, both are of the later stretch alone.

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
        """The value of a key of the configuration, "trainer.optim.lr"; None where it is not set."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def now(self, key: str) -> str:
        """The key with its present value, for advice.

        >>> Window(steps=[], config={"trainer": {"optim": {"lr": 0.0008}}}).now("trainer.optim.lr")
        'trainer.optim.lr (now 0.0008)'
        """
        value = self.setting(key)
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"{key} (not set)" if value is None else f"{key} (now {shown})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule sees at one step, of one environment or of the run."""

    message: str
    """One sentence: what is seen, with its numbers."""
    cause: str
    """What most often causes it."""
    advice: str
    """The key to change, with its present value (`Window.now`), and what to try."""
    level: float = 1.0
    """How far it is, 1 where the alarm is raised. Below 1 nothing is raised; at `HOLD` or more, an alarm that was
    raised is not cleared."""
    evidence: Figures = field(default_factory=dict)
    """Metrics that show it, by name."""
    env: str | None = None
    """The environment that it is about; None: the run."""
    trajectory_ids: tuple[str, ...] = ()
    """Trajectories of this step that show it."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a condition of `ALARMS` sees at one step, of an environment or of the run: a `Finding` without its texts."""

    level: float
    """As in `Finding`."""
    env: str | None = None
    """As in `Finding`."""
    why: str = ""
    """Which of the alarm's causes fits."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the texts name, beside parameters and evidence."""
    evidence: Figures = field(default_factory=dict)
    """Figures that show it, beside the alarm's metrics of the step."""


TRAINING, TRAINING_ERROR = "training/success", "training/success_error"
"""What an evaluation is compared with."""
TOOL, UNTRAINED = "tool/", "untrained/"
"""What the figures of a tool's calls, and of the reasons for which rollouts are not trained, begin with."""
HOLD = 0.7
"""The level below which an alarm that was raised begins to be cleared."""


class Rule(Protocol):
    """What one alarm looks for: a function, or a frozen dataclass whose fields are its parameters. It keeps no state.

    It is called after each step. One with `on_evaluations = True` is called after each evaluation instead.
    `clear_after` (5 steps by default, or 1 evaluation) is how many such calls in a row have to find a level below
    `HOLD` until the alarm is cleared.
    """

    def __call__(self, window: Window, /) -> Iterable[Finding] | Finding | None:
        """What the window shows: at most one finding for each environment, and one for the run."""


def training_before(steps: Sequence[StepFigures], env: str) -> dict[str, float]:
    """`TRAINING` and `TRAINING_ERROR` of these steps: of the same environment, or of all where it is not trained.

    The error is that of the steps' mean, and not below that of a share of so many rollouts. Example: successes of 0.4
    and 0.6 in two steps of 50 rollouts: 0.5, with an error of max(0.1 / sqrt(2), sqrt(0.25 / 100)) = 0.071.
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
    """The standard error of a share of so many, which is not 0 where it is 0 or 1."""
    count = max(1.0, count)
    rounded = (share * count + 1) / (count + 2)
    return math.sqrt(rounded * (1 - rounded) / count)


def over(value: float, bound: float) -> float:
    """How far a value is, 1 at the bound."""
    return value / max(bound, 1e-9)


def median(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def _having(steps: Sequence[StepFigures], env: str | None) -> Sequence[StepFigures]:
    """The steps that have rollouts of an environment; all for None."""
    return [figures for figures in steps if env is None or env in figures.envs]


def _rows(
    steps: Sequence[StepFigures], names: Sequence[str], count: int, env: str | None, missing: float | None
) -> list[tuple[float, ...]]:
    """The values of the steps that have all of them; empty where these are fewer than half of `count`, or there are
    fewer steps."""
    rows: list[tuple[Any, ...]] = [tuple(own.of(env).get(name, missing) for name in names) for own in steps]
    found = [row for row in rows if None not in row]
    return found if len(steps) >= count and 2 * len(found) >= count else []
