"""The alarm `entropy_collapse`."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.config.sections import Fraction, PositiveInt
from verbatim.logs.monitors.alarms.base import Finding, Window, is_mastered, median
from verbatim.logs.monitors.alarms.change import chance_of_rise

_STILL_RISES = 0.05
"""The chance below which a reward counts as still rising: less strict than for an alarm, so that a run that learns is
left alone."""


@dataclass(frozen=True, kw_only=True)
class EntropyCollapse:
    """The entropy has fallen to `share` of what it was in the first steps, the task is not solved, and the reward no
    longer rises.

    Entropy falls in every run that learns, to a hundredth and less in recipes that end with a success of 1. It is a
    fault only where nothing is gained by it any more.
    """

    share: Fraction = 0.05
    """Of the entropy of the first steps."""
    solved: Fraction = 0.9
    """Success from which on a low entropy is what one wants."""
    steps: PositiveInt = 8
    """Steps of each median."""

    def __call__(self, window: Window) -> Finding | None:
        """What the last steps show."""
        if window.setting("orchestrator.training_mode") not in (None, "rl"):
            return None  # a teacher's entropy is the aim there
        before = median([e for figures in window.first[: self.steps] if (e := figures.metrics.get("entropy"))])
        now = window.median("entropy", self.steps)
        success, rewards = window.median("success", self.steps), window.recent("reward/mean", self.steps)
        earlier = window.earlier("reward/mean", self.steps)
        if before is None or now is None or success is None or not earlier:
            return None
        is_fine = success >= self.solved or is_mastered(window, self.steps)
        is_fine |= chance_of_rise(earlier[-1], rewards) < _STILL_RISES
        return Finding(
            level=0.0 if is_fine else before * self.share / max(now, 1e-12),
            message=f"entropy is {now:.3g}, {now / before:.1%} of the first steps' {before:.3g}, while success stands "
            f"at {success:.2f} and the reward no longer rises",
            cause="the policy has stopped exploring: all rollouts of a group say the same, and nothing is left to "
            "learn from",
            advice=f"go back to a checkpoint before the fall and lower {window.now('trainer.optim.lr')}; keep "
            f"{window.now('orchestrator.sampling.temperature')} at 1.0; raise {window.now('orchestrator.group_size')}",
            evidence={"entropy": now, "success": success, "entropy of the first steps": before},
        )
