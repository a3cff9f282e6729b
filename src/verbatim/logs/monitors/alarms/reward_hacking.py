"""The alarm `reward_hacking`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from verbatim.config.sections import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from verbatim.core.trajectories import Fate
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.logs.monitors.alarms.base import Finding, Window
from verbatim.logs.monitors.alarms.change import rises
from verbatim.logs.monitors.alarms.figures import LOOKED_AT, calls_of, repetition, tokens_per_turn

_SHOWN = 5
_TOOL = "tool/"


@dataclass(frozen=True, kw_only=True)
class _Growth:
    """One figure of an environment that has grown."""

    figure: str
    before: float
    now: float
    level: float
    """How much it has grown, 1 at the bound."""
    credit: float
    """Its correlation with the reward within groups."""

    @property
    def said(self) -> str:
        if self.figure.startswith(_TOOL):
            name = self.figure.removeprefix(_TOOL)
            return f"the calls of the tool {name} went from {self.before:.1f} to {self.now:.1f} for each rollout"
        if self.figure == "repetition":
            return f"the repeated share of 4-grams went from {self.before:.0%} to {self.now:.0%}"
        return f"the tokens of a turn went from {self.before:.0f} to {self.now:.0f}"


@dataclass(frozen=True, kw_only=True)
class RewardHacking:
    """The reward of an environment rises while length, repetition or the use of one tool explodes, and is paid for.

    All of it has to hold: the reward rose surely (`change.SURE`), by `rise` standard deviations of the rollouts; the
    figure rose surely and by much, above both the run's first steps and those some `4 * steps` ago (so that a slow
    growth, or a return after a dip, is none); and within groups rollouts with more of it earn more, with a correlation
    of `credit`. A run whose evaluation, or whose own `is_success`, rises too is left alone.
    """

    growth: PositiveFloat = 2.0
    """Of the tokens of a turn: now over before."""
    repetition: Fraction = 0.2
    """By which the share of repeated 4-grams grew."""
    tool_growth: PositiveFloat = 3.0
    """Of the calls of one tool, which also grew by `tool_calls`."""
    tool_calls: PositiveFloat = 3.0
    """For each rollout."""
    rise: NonNegativeFloat = 0.25
    """Of the reward, in standard deviations of a batch's rewards."""
    credit: Fraction = 0.3
    """Correlation with the reward within groups."""
    steps: PositiveInt = 8
    """Steps that are compared with as many earlier ones."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        for env in window.envs:
            gained = self._gained(window, env)
            if gained <= 0 or _is_acquitted(window, env, self.steps):
                continue
            found = max(self._growths(window, env), key=lambda growth: growth.level, default=None)
            if found is None:
                continue
            reward = window.median("reward", self.steps, env)
            was = min(statistics.median(values) for values in window.earlier("reward", self.steps, env))
            yield Finding(
                env=env,
                level=min(found.level, gained),
                message=f"the reward of {env} rose from {was:.3g} to {reward:.3g}, and {found.said} (medians of "
                f"{self.steps} steps); within groups it correlates with the reward by {found.credit:.2f}",
                cause="the reward can be earned by more of this instead of by solving the task",
                advice=_advice(window, found),
                evidence={
                    f"reward/{env}/mean": reward or math.nan,
                    found.figure: found.now,
                    f"{found.figure} before": found.before,
                    "correlation with the reward": found.credit,
                },
                trajectory_ids=_most_of(window.fates, env, found.figure),
            )

    def _gained(self, window: Window, env: str) -> float:
        """By how much the reward rose, 1 at the bound; 0 where it is not sure."""
        now, earlier = window.recent("reward", self.steps, env), window.earlier("reward", self.steps, env)
        if not now or not earlier or not all(rises(values, now) for values in earlier):
            return 0.0
        spread = window.median("reward_std", self.steps, env) or 0.0
        was = max(statistics.median(values) for values in earlier)
        gained = statistics.median(now) - was
        return gained / max(spread * self.rise, 1e-9)

    def _growths(self, window: Window, env: str) -> Iterator[_Growth]:
        names = ["tokens_per_turn", "repetition"]
        names += [name for name in window.steps[-1].envs.get(env, {}) if name.startswith(_TOOL)]
        for name in names:
            missing = 0.0 if name.startswith(_TOOL) else None
            now = window.recent(name, self.steps, env, missing=missing)
            earlier = window.earlier(name, self.steps, env, missing=missing)
            credit = window.median(f"credit/{name}", self.steps, env)
            if not now or not earlier or credit is None or not all(rises(values, now) for values in earlier):
                continue
            was, level = max(statistics.median(values) for values in earlier), statistics.median(now)
            grown = self._grown(name, was, level)
            yield _Growth(
                figure=name, before=was, now=level, credit=credit, level=min(grown, credit / max(self.credit, 1e-9))
            )

    def _grown(self, name: str, was: float, now: float) -> float:
        if name == "repetition":
            return (now - was) / max(self.repetition, 1e-9)
        if name == "tokens_per_turn":
            return now / max(was * self.growth, 1e-9)
        return min(now / max(was * self.tool_growth, 1e-9), (now - was) / self.tool_calls)


def _is_acquitted(window: Window, env: str, count: int) -> bool:
    """Whether something that the reward does not decide has risen too."""
    evaluations = window.evaluations.get(env, ())
    if len(evaluations) >= 2 and evaluations[-1][0] >= window.step - 4 * count:
        (_, last), (_, before) = evaluations[-1], evaluations[-2]
        if "success" in last and "success" in before:
            p, n = last["success"], max(1.0, last.get("episodes", 1.0))
            if p - before["success"] > 2 * math.sqrt(2 * max(p * (1 - p), 1 / n) / n):
                return True
    success, full = window.recent("success", count, env), window.recent("full_reward", count, env)
    if not success or len(success) != len(full) or all(abs(s - f) < 0.02 for s, f in zip(success, full, strict=True)):
        return False  # the environment does not say what success is: it is the reward
    earlier = window.earlier("success", count, env)
    return bool(earlier) and all(rises(values, success) for values in earlier)


def _advice(window: Window, found: _Growth) -> str:
    if found.figure.startswith(_TOOL):
        return (
            "read these rollouts; pay for the result instead of for calls, or pay less for each of them with "
            f'{window.now("orchestrator.length_penalty.type")} = "turns"; bound them by max_turns'
        )
    if found.figure == "repetition":
        return (
            "read these rollouts; keep the filter `repetition`, lower "
            f"{window.now('orchestrator.sampling.max_tokens')}, and take what is repeated out of the "
            "reward"
        )
    return (
        f'read these rollouts; set {window.now("orchestrator.length_penalty.type")} to "tokens" with a target, '
        f"lower {window.now('orchestrator.sampling.max_tokens')}, and take length out of the reward"
    )


def _most_of(fates: Sequence[Fate], env: str, figure: str) -> tuple[str, ...]:
    """The trajectories with most of the figure among those that earned at least the median."""
    own = [f.trajectory for f in fates if f.trajectory.env == env and f.trajectory.error is None]
    rewards = [t.reward for t in own if t.reward is not None]
    if not rewards:
        return ()
    middle = statistics.median(rewards)
    paid = [t for t in own if t.reward is not None and t.reward >= middle][:LOOKED_AT]
    measure: Callable[[TrajectoryRecord], float] = tokens_per_turn
    if figure == "repetition":
        shares = dict(zip((t.trajectory_id for t in paid), repetition(paid), strict=True))
        measure = lambda t: shares[t.trajectory_id] or 0.0  # noqa: E731
    elif figure.startswith(_TOOL):
        measure = lambda t: float(calls_of(t)[figure.removeprefix(_TOOL)])  # noqa: E731
    return tuple(t.trajectory_id for t in sorted(paid, key=measure, reverse=True)[:_SHOWN])
