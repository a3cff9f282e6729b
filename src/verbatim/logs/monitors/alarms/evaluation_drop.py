"""The alarm `evaluation_drop`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from verbatim.config.sections import Fraction, NonNegativeFloat
from verbatim.core.records.failed import MAX_FAILED, too_many_failed
from verbatim.logs.monitors.alarms.base import TRAINING, TRAINING_ERROR, Figures, Finding, Window
from verbatim.logs.monitors.alarms.change import SURE

_Z95 = NormalDist().inv_cdf(0.975)
_Evaluation = tuple[int, Figures]
"""Its step and its metrics."""


@dataclass(frozen=True, kw_only=True)
class EvaluationDrop:
    """The success of an evaluation, or its reward, is lower than the best before, by more than chance.

    The two are compared by their 95% intervals (Newcombe 1998, method 10). The best of many evaluations is in part
    luck, so the more there are, the surer the fall has to be: its chance is at most `change.SURE` over the number of
    evaluations before, for success and reward together.
    """

    on_evaluations: ClassVar[bool] = True
    clear_after: ClassVar[int] = 1
    fall: Fraction = 0.1
    """By how much success has to be lower."""
    reward_fall: NonNegativeFloat = 0.2
    """By how much the reward has to be lower, in standard deviations of one evaluation's rewards: the larger of the
    two."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the evaluations show."""
        given = window.setting("orchestrator.eval.max_failed")
        most = MAX_FAILED if given is None else float(given)
        for env, (*before, last) in window.evaluations.items():
            found = [self._compared(name, before, last, most) for name in ("success", "reward/mean")]
            drops = [drop for drop in found if drop is not None]
            if drops:
                yield _finding(window, env, last, max(drops, key=lambda drop: drop.level))

    def _compared(self, name: str, before: Sequence[_Evaluation], last: _Evaluation, most: float) -> _Drop | None:
        known = [evaluation for evaluation in before if _has(name, evaluation, most)]
        if not known or not _has(name, last, most):
            return None
        best = max(known, key=lambda evaluation: evaluation[1][name])
        was, now = best[1][name], last[1][name]
        scale = _scale(best[1], last[1])
        low, high = _interval(best[1], name, scale)[0], _interval(last[1], name, scale)[1]
        spread = math.hypot(was - low, high - now) / _Z95
        sure = NormalDist().inv_cdf(1 - SURE / (2 * len(known)))
        large = self.fall if name == "success" else self.reward_fall * scale
        level = min((was - now) / max(sure * spread, 1e-9), (was - now) / max(large, 1e-9))
        return _Drop(name=name, best=best, level=max(0.0, level))


def _has(name: str, evaluation: _Evaluation, most: float) -> bool:
    """Whether it measured this. A failed episode is no success; a mean reward is that of the survivors."""
    metrics = evaluation[1]
    if name not in metrics:
        return False
    failed = too_many_failed(int(metrics.get("failed", 0)), int(metrics.get("episodes", 0)), most)
    return name == "success" or failed is None


@dataclass(frozen=True, kw_only=True)
class _Drop:
    """How far a metric is below the best evaluation's."""

    name: str
    best: _Evaluation
    level: float


def _finding(window: Window, env: str, last: _Evaluation, drop: _Drop) -> Finding:
    began, best = drop.best
    was, now = best[drop.name], last[1][drop.name]
    what = "success" if drop.name == "success" else "mean reward"
    cause, advice = _why(window, began, best, last[1])
    intervals = [_shown(evaluation, drop.name, _scale(best, last[1])) for evaluation in (best, last[1])]
    names = ("success", "reward/mean", "failed", "truncated", TRAINING)
    return Finding(
        env=env,
        level=drop.level,
        message=f"the {what} of the evaluation of {env} fell from {was:.3g} at step {began}, its best, to {now:.3g} "
        f"(95% intervals {intervals[0]} and {intervals[1]})",
        cause=cause,
        advice=advice,
        evidence={**{name: last[1][name] for name in names if name in last[1]}, f"best {drop.name}": was},
    )


def _why(window: Window, step: int, best: Figures, last: Figures) -> tuple[str, str]:
    """The cause that the evaluation's other metrics point to, and what to change."""
    failed, before = (one.get("failed", 0.0) / max(1.0, one.get("episodes", 0.0)) for one in (last, best))
    if failed - before > 0.5 * (best.get("success", 0.0) - last.get("success", 0.0)) > 0:
        return (
            f"{failed:.0%} of its episodes failed, {before:.0%} of the best one's",
            "look at the errors of these episodes (evaluations/ of the run folder); the policy may be well",
        )
    back = f"go on from the checkpoint at step {step} or before ({window.now('checkpoint.keep_every')})"
    if TRAINING in last and TRAINING in best:
        error = math.hypot(last[TRAINING_ERROR], best[TRAINING_ERROR])
        if last[TRAINING] >= best[TRAINING] - error:
            return (
                "the policy learns the training examples at the cost of others: the success of training did not fall "
                f"({best[TRAINING]:.2f} to {last[TRAINING]:.2f})",
                f"{back} with more or other training examples, or lower {window.now('trainer.optim.lr')}",
            )
    return (
        "updates have made the policy worse; alarms of the steps since then say more",
        f"{back} and lower {window.now('trainer.optim.lr')} or {window.now('trainer.optim.max_grad_norm')}",
    )


def _scale(best: Figures, last: Figures) -> float:
    """The deviation of rewards: the larger of the two evaluations'. Where all rewards of each are equal, their distance
    is all that is known."""
    deviation = max(best.get("reward/std", 0.0), last.get("reward/std", 0.0))
    return deviation or abs(best.get("reward/mean", 0.0) - last.get("reward/mean", 0.0))


def _interval(evaluation: Figures, name: str, scale: float) -> tuple[float, float]:
    """The metric's 95% interval: the evaluation's own, or else that of as many independent episodes. Behind n equal
    rewards there may be a share of z^2 / (n + z^2) others (Wilson's interval of n in n), `scale` away."""
    value, start = evaluation[name], name.removesuffix("/mean")
    if f"{start}/low" in evaluation and f"{start}/high" in evaluation:
        return evaluation[f"{start}/low"], evaluation[f"{start}/high"]
    count = max(1.0, evaluation.get("episodes", 1.0))
    if name == "success":
        rounded = (value * count + 2) / (count + 4)  # never without a width, as Agresti and Coull's
        half = _Z95 * math.sqrt(rounded * (1 - rounded) / (count + 4))
    elif evaluation.get("reward/std") == 0:
        half = scale * _Z95**2 / (count + _Z95**2)
    else:
        half = _Z95 * evaluation.get("reward/std", math.inf) / math.sqrt(count)
    return value - half, value + half


def _shown(evaluation: Figures, name: str, scale: float) -> str:
    low, high = _interval(evaluation, name, scale)
    return f"{low:.3g} to {high:.3g}"
