"""Alarms about a reward that rises alone: `reward_success_gap` and `evaluation_flat`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from verbatim.config.sections import Fraction, NonNegativeFloat, PositiveInt
from verbatim.core.records.equality import is_at_least
from verbatim.core.trajectories import Fate
from verbatim.logs.monitors.alarms.base import TRAINING, TRAINING_ERROR, Figures, Finding, Window, training_before
from verbatim.logs.monitors.alarms.change import falls, rises

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class RewardSuccessGap:
    """The reward of an environment rises while its success falls.

    Both changes have to be sure (`change.SURE`) against the run's first steps or against steps some `4 * steps` ago,
    and large: the reward by `rise` standard deviations of the rollouts, the success by `fall`.
    """

    rise: NonNegativeFloat = 0.2
    """Of the reward, in standard deviations of a batch's rewards."""
    fall: Fraction = 0.1
    """Of the success."""
    steps: PositiveInt = 8
    """Steps that are compared with as many earlier ones."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        for env in window.envs:
            rewards, successes = (window.recent(name, self.steps, env) for name in ("reward", "success"))
            if not rewards or not successes:
                continue
            spread = window.median("reward_std", self.steps, env) or 0.0
            for earlier_r, earlier_s in window.earlier_together(("reward", "success"), self.steps, env):
                was_r, is_r = statistics.median(earlier_r), statistics.median(rewards)
                was_s, is_s = statistics.median(earlier_s), statistics.median(successes)
                if not (rises(earlier_r, rewards) and falls(earlier_s, successes)):
                    continue
                gained = (is_r - was_r) / spread if spread > 0 else math.inf
                yield Finding(
                    env=env,
                    level=min(gained / max(self.rise, 1e-9), (was_s - is_s) / max(self.fall, 1e-9)),
                    message=f"the reward of {env} rose from {was_r:.3g} to {is_r:.3g} while its success fell from "
                    f"{was_s:.2f} to {is_s:.2f} (medians of {self.steps} steps)",
                    cause="the reward can be earned without solving the task",
                    advice=f"read these episodes, and change what `score` pays for; {_parts(window, env)}the run can "
                    "go on from a checkpoint before the two parted",
                    evidence={
                        f"reward/{env}/mean": is_r,
                        f"success/{env}": is_s,
                        "reward before": was_r,
                        "success before": was_s,
                    },
                    trajectory_ids=_paid_without_success(window.fates, env),
                )
                break


@dataclass(frozen=True, kw_only=True)
class EvaluationFlat:
    """The success of training rises over the last evaluations, and that of the evaluation does not.

    Over `evaluations` of them, the evaluation's success has not risen by more than its standard error, the training's
    has risen by `rise` and by three standard errors, and it is now above the evaluation's by three standard errors of
    their difference: for a policy that does equally well on both, the last is chance once in 700 evaluations.
    """

    on_evaluations: ClassVar[bool] = True
    clear_after: ClassVar[int] = 1
    rise: Fraction = 0.1
    """Of the success of training."""
    evaluations: PositiveInt = 4
    """The first and the last of so many are compared."""
    solved: Fraction = 0.9
    """Success of the evaluation from which on nothing is left to gain."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the evaluations show."""
        for env, evaluations in window.evaluations.items():
            if len(evaluations) < self.evaluations:
                continue
            (began, first), (step, last) = evaluations[-self.evaluations], evaluations[-1]
            earlier = first if TRAINING in first else training_before(window.first[:5], env)
            if TRAINING not in earlier or TRAINING not in last or "success" not in first or "success" not in last:
                continue
            had, has = earlier[TRAINING], last[TRAINING]
            was, now = first["success"], last["success"]
            is_flat = now - was <= math.hypot(_error(first), _error(last)) and now < self.solved
            risen = (has - had) / (3 * math.hypot(earlier[TRAINING_ERROR], last[TRAINING_ERROR]))
            ahead = (has - now) / (3 * math.hypot(_error(last), last[TRAINING_ERROR]))
            yield Finding(
                env=env,
                level=min((has - had) / max(self.rise, 1e-9), risen, ahead) if is_flat else 0.0,
                message=f"from step {began} to {step} the success of training rose from {had:.2f} to {has:.2f}, and "
                f"that of the evaluation of {env} went from {was:.2f} to {now:.2f}",
                cause="the policy learns the training examples, or a way to be rewarded that the evaluation does not "
                "pay",
                advice="take more or other training examples, and go on from an earlier checkpoint "
                f"({window.now('checkpoint.keep_every')}); {window.now('orchestrator.eval.interval')} says how often "
                "is looked",
                evidence={
                    "success of training": has,
                    "success of training before": had,
                    "success of evaluation": now,
                    "success of evaluation before": was,
                },
            )


def _error(evaluation: Figures) -> float:
    """The standard error of a success, which is not 0 where all or none succeed."""
    count = max(1.0, evaluation.get("episodes", 1.0))
    rounded = (evaluation["success"] * count + 1) / (count + 2)
    return math.sqrt(rounded * (1 - rounded) / count)


def _parts(window: Window, env: str) -> str:
    """The part of the reward that has risen most, where it has parts."""
    start, found = f"reward_part/{env}/", []
    if not window.steps or not window.first:
        return ""
    for name, value in window.steps[-1].metrics.items():
        if name.startswith(start) and name.endswith("/mean"):
            found.append((value - window.first[0].metrics.get(name, value), name))
    rise, name = max(found, default=(0.0, ""))
    return f"the part that rose most is {name} (by {rise:.3g}); " if rise > 0 else ""


def _paid_without_success(fates: Sequence[Fate], env: str) -> tuple[str, ...]:
    """Trajectories with the highest rewards below 1, or with the highest ones where there are none."""
    own = [f.trajectory for f in fates if f.trajectory.env == env and f.trajectory.reward is not None]
    own.sort(key=lambda t: (t.reward is not None and is_at_least(t.reward, 1.0), -(t.reward or 0.0)))
    return tuple(t.trajectory_id for t in own[:_SHOWN])
