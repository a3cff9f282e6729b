"""Alarms about a side of the run that has nothing to do: `sampler_idle` and `trainer_idle`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from verbatim.config.sections import Fraction, NonNegativeFloat, PositiveInt
from verbatim.logs.monitors.alarms.base import HOLD, Finding, Window


@dataclass(frozen=True, kw_only=True)
class SamplerIdle:
    """The sampler has nothing to do for `share` of the time, and for `seconds` of a step, as the median of the last
    steps.

    Where the two sides take turns (`max_async_level = 0`, or one device for both) that is how the run was set up; so it
    is in the mode "sft", where a teacher plays the episodes and the sampler the evaluations alone. Where the trainer
    waits as much, neither side is the slower one, and `trainer_idle` says what to do.
    """

    share: Fraction = 0.8
    """Of a step."""
    seconds: NonNegativeFloat = 10.0
    """Of each step: where steps are short, waiting costs little."""
    steps: PositiveInt = 8
    """Steps of the median."""

    def __call__(self, window: Window) -> Finding | None:
        """What the last steps show."""
        if window.setting("orchestrator.training_mode") == "sft":
            return None
        idle, share = _idle(window, "time/sampler_idle", self.steps, busy_if_all_were_trained=False)
        other, other_share = _idle(window, "time/trainer_idle", self.steps, busy_if_all_were_trained=True)
        both = other is not None and _level(other, other_share, self.seconds, self.share) >= HOLD
        return (
            None
            if idle is None
            else Finding(
                level=0.0 if both else _level(idle, share, self.seconds, self.share),
                message=f"the sampler waits {share:.0%} of a step, {idle:.1f} s of {_step(window, self.steps):.1f} s "
                f"(medians of {self.steps} steps)",
                cause="the trainer is the slower side",
                advice=f"give the trainer more processes ({window.now('trainer.parallel.processes')}) or "
                f"{window.now('trainer.dtype')}; or let the sampler run ahead: "
                f"{window.now('orchestrator.max_async_level')}",
                evidence=_evidence(window),
            )
        )


@dataclass(frozen=True, kw_only=True)
class TrainerIdle:
    """The trainer has nothing to do for `share` of the time, and for `seconds` of a step, as the median of the last
    steps.

    A trainer that is given little, because filters dropped most rollouts, is counted as if it had been given all of
    them: what it needed, over the trained share of the tokens.
    """

    share: Fraction = 0.8
    """Of a step."""
    seconds: NonNegativeFloat = 10.0
    """Of each step: where steps are short, waiting costs little."""
    steps: PositiveInt = 8
    """Steps of the median."""

    def __call__(self, window: Window) -> Finding | None:
        """What the last steps show."""
        idle, share = _idle(window, "time/trainer_idle", self.steps, busy_if_all_were_trained=True)
        other, other_share = _idle(window, "time/sampler_idle", self.steps, busy_if_all_were_trained=False)
        both = other is not None and _level(other, other_share, self.seconds, self.share) >= HOLD
        cause, advice = _why_trainer_waits(window, sampler_waits=both)
        return (
            None
            if idle is None
            else Finding(
                level=_level(idle, share, self.seconds, self.share),
                message=f"the trainer waits {share:.0%} of a step, {idle:.1f} s of {_step(window, self.steps):.1f} s "
                f"(medians of {self.steps} steps)",
                cause=cause,
                advice=advice,
                evidence=_evidence(window),
            )
        )


def _why_trainer_waits(window: Window, *, sampler_waits: bool) -> tuple[str, str]:
    """Cause and advice."""
    single = "or single episodes take much longer than the rest"
    more = f"raise {window.now('orchestrator.max_concurrent')}, or lower {window.now('orchestrator.episode_timeout')}"
    if window.setting("orchestrator.training_mode") == "sft":
        return (
            f"the teacher's server is the slower side, {single}",
            f"give the teacher's server more replicas or devices, {more}",
        )
    if sampler_waits:
        return (
            "the sampler waits as much: episodes wait for their tools, their judge or their environment",
            f"make these answer sooner, {more}",
        )
    return (
        f"the sampler is the slower side, {single}",
        f"give the sampler more replicas or devices ([inference.{window.setting('inference.backend')}]), {more}",
    )


def _idle(window: Window, name: str, count: int, *, busy_if_all_were_trained: bool) -> tuple[float | None, float]:
    """Seconds of waiting in a step and its share, as medians; None where the sides take turns or nothing is measured.

    The time of the step is what the side waited and worked, at least the time between two steps: an evaluation and a
    checkpoint are in it.
    """
    if not window.setting("orchestrator.max_async_level") or window.metric("time/sampler_asleep") is not None:
        return None, 0.0
    waits, shares = [], []
    for figures in window.steps[-count:]:
        wait, step = figures.metrics.get(name), figures.metrics.get("time/step")
        if wait is None or not step:
            continue
        wait = min(wait, step)
        if busy_if_all_were_trained:
            trained = figures.metrics.get("trained_tokens", 0.0)
            rollouts = figures.metrics.get("rollouts", 0.0) * figures.metrics.get("completion_tokens", 0.0)
            if not trained:
                continue
            wait = max(0.0, min(wait, step - figures.metrics.get("seconds", 0.0) * rollouts / trained))
        waits.append(wait)
        shares.append(wait / step)
    if len(window.steps) < count or 2 * len(waits) < count:
        return None, 0.0
    return statistics.median(waits), statistics.median(shares)


def _level(idle: float, share: float, seconds: float, bound: float) -> float:
    return min(share / max(bound, 1e-9), idle / seconds if seconds else share / max(bound, 1e-9))


def _step(window: Window, count: int) -> float:
    return window.median("time/step", count) or 0.0


def _evidence(window: Window) -> dict[str, float]:
    names = ("time/step", "time/sampler_idle", "time/trainer_idle", "time/wait_for_batch", "time/wait_for_trainer")
    return {name: value for name in names if (value := window.metric(name)) is not None}
