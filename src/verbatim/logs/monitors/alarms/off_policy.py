"""Alarms about the distance between the policy that sampled and the policy that is trained."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.config.sections import FinitePositive, Fraction, NonNegativeFloat, PositiveInt
from verbatim.core.trajectories import Fate, first_version
from verbatim.logs.monitors.alarms.base import Finding, Window

_SHOWN = 5
"""Trajectories that a finding names."""


@dataclass(frozen=True, kw_only=True)
class MismatchKl:
    """The mismatch KL between sampler and trainer is above `bound`, as the median of the last steps.

    A few bad batches are no alarm: more than half of the steps have to be above. Recipes that learn are below 0.005 on
    average; their policies fall for up to eight steps at times, and come back by themselves.
    """

    bound: FinitePositive = 0.05
    """The largest mismatch KL."""
    steps: PositiveInt = 8
    """Steps of the median."""

    def __call__(self, window: Window) -> Finding | None:
        """What the last steps show."""
        value = window.median("mismatch_kl", self.steps)
        if value is None:
            return None
        cause, advice = _why_off_policy(window)
        return Finding(
            level=value / self.bound,
            message=f"mismatch_kl is {value:.3g}, the median of {self.steps} steps; the bound is {self.bound:g}",
            cause=cause,
            advice=advice,
            evidence=_evidence(window, "mismatch_kl", "importance_ratio_max", "staleness/mean", "weights/canary"),
            trajectory_ids=_furthest(window.fates) if value >= self.bound else (),
        )


@dataclass(frozen=True, kw_only=True)
class MaskedTokens:
    """The loss masks more than this share of the trained tokens, as the median of the last steps."""

    share: Fraction = 0.1
    """The largest share."""
    steps: PositiveInt = 8
    """Steps of the median."""

    def __call__(self, window: Window) -> Finding | None:
        """What the last steps show."""
        counts = window.together(("masked_by_loss", "trained_tokens"), self.steps)
        if not any(trained for _, trained in counts):
            return None
        value = statistics.median(masked / trained if trained else 0.0 for masked, trained in counts)
        cause, advice = _why_off_policy(window)
        return Finding(
            level=value / max(self.share, 1e-9),
            message=f"the loss masks {value:.1%} of the trained tokens, the median of {self.steps} steps; the bound is "
            f"{self.share:.1%}",
            cause=cause,
            advice=advice,
            evidence=_evidence(window, "masked_by_loss", "trained_tokens", "mismatch_kl", "staleness/mean"),
            trajectory_ids=_furthest(window.fates) if value >= self.share else (),
        )


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """Rollouts are older than the run was set up for, or too many are dropped for their age.

    With `max_async_level` of k, rollouts are k steps old; those that take longer are a step older for each step.
    """

    beyond: NonNegativeFloat = 1.0
    """Steps by which the mean age may be above `orchestrator.max_async_level`."""
    dropped: Fraction = 0.1
    """The largest share of rollouts that are dropped as too old."""
    steps: PositiveInt = 5
    """Steps of the median."""

    def __call__(self, window: Window) -> Finding | None:
        """What the last steps show."""
        level = float(window.setting("orchestrator.max_async_level") or 0)
        mean = window.median("staleness/mean", self.steps)
        if mean is None:
            return None
        counts = window.together(("staleness/dropped", "rollouts"), self.steps)
        shares = [lost / (lost + rollouts) if lost + rollouts else 0.0 for lost, rollouts in counts]
        share = statistics.median(shares) if shares else 0.0
        too_old = mean / (level + self.beyond) if level + self.beyond else float(mean > 0)
        found = max(too_old, share / max(self.dropped, 1e-9))
        cause, advice = _why_old(window)
        return Finding(
            level=found,
            message=f"rollouts are {mean:.2f} steps old when they are trained, where {level:g} are asked for, and "
            f"{share:.1%} are dropped as too old (medians of {self.steps} steps)",
            cause=cause,
            advice=advice,
            evidence=_evidence(
                window, "staleness/mean", "staleness/max", "staleness/dropped", "policy_version", "time/weight_sync"
            ),
            trajectory_ids=_oldest(window.fates) if found >= 1 else (),
        )


def _why_old(window: Window) -> tuple[str, str]:
    """What the oldest rollout of the step says, and what to change."""
    records = [fate.trajectory for fate in window.fates]
    versions = [(version, record.env) for record in records if (version := first_version(record)) is not None]
    several = "episodes take several steps, or the trainer is much faster than the sampler"
    sooner = (
        f"lower orchestrator.max_concurrent or max_turns so that episodes end sooner, or lower "
        f"{window.now('orchestrator.max_async_level')}; if staleness/max is at "
        f"{window.now('orchestrator.max_off_policy_steps')} and few are dropped, the age may be accepted"
    )
    if not versions:
        return several, sooner
    version, env = min(versions)
    if version == 0 and window.step > 4:
        return (
            f"rollouts of {env} are still sampled by version 0 at step {window.step}: new weights do not reach its "
            "sampler",
            "look at weights/canary and at the sampler's log for weights that were not loaded, and resume the run once "
            f"they are ({window.now('inference.backend')})",
        )
    return f"{several}; the oldest is of {env}, sampled by version {version}", sooner


def _why_off_policy(window: Window) -> tuple[str, str]:
    """The cause that the other metrics point to, and what to change."""
    level = window.setting("orchestrator.max_async_level") or 0
    age = window.metric("staleness/mean") or 0.0
    canary, allowed = window.metric("weights/canary"), window.metric("weights/canary_allowed")
    if canary is not None and canary > 0.01 and (allowed is None or canary > 0.5 * allowed):
        return (
            f"the sampler does not hold the trainer's weights: their logprobs differ by {canary:.3g} on the canary",
            f"lower {window.now('inference.canary_tolerance')}, so that the run stops there, and look at the sampler's "
            "log for weights that were not loaded",
        )
    if (window.metric("truncation_mismatch") or 0.0) > 0:
        return (
            "tokens are sampled from a distribution that top_p, top_k or min_p cut, and scored under the whole one",
            f"remove {window.now('orchestrator.sampling.top_p')}, top_k and min_p",
        )
    if age > float(level) + 0.5:
        return (
            f"rollouts are {age:.2f} steps old",
            f"lower {window.now('orchestrator.max_async_level')} or {window.now('orchestrator.max_off_policy_steps')}",
        )
    if window.step <= 10 and (window.first[0].metrics.get("mismatch_kl") or 0.0 if window.first else 0.0) > 0.01:
        return (
            "sampler and trainer compute the same tokens differently: it was so at the first step, before any update",
            f"compare {window.now('trainer.dtype')} with the precision of the sampler (inference.torch.dtype, "
            "inference.vllm.dtype); with a mixture of experts, record its routing",
        )
    if (window.setting("trainer.optimizer_steps_per_batch") or 1) > 1:
        return (
            "every optimizer step on a batch but the first is off-policy",
            f"set {window.now('trainer.optimizer_steps_per_batch')} to 1, or lower {window.now('trainer.optim.lr')}",
        )
    return (
        "the policy moves too far in a step",
        f"lower {window.now('trainer.optim.lr')} to a third, or lower {window.now('trainer.optim.max_grad_norm')}",
    )


def _evidence(window: Window, *names: str) -> dict[str, float]:
    return {name: value for name in names if (value := window.metric(name)) is not None}


def _furthest(fates: Sequence[Fate]) -> tuple[str, ...]:
    """The trajectories whose logprobs differ most between trainer and sampler, by the mean over their tokens."""
    found = []
    for fate in filter(lambda fate: fate.trainer_logprobs, fates):
        pairs = [
            (trainer, turn.logprobs)
            for trainer, turn in zip(fate.trainer_logprobs, fate.trajectory.turns, strict=True)
            if trainer is not None and turn.logprobs is not None and len(turn.logprobs)
        ]
        if pairs:
            moved = np.concatenate([trainer - sampler for trainer, sampler in pairs])
            found.append((float(np.abs(moved).mean()), fate.trajectory.trajectory_id))
    return tuple(name for _, name in sorted(found, key=lambda pair: -pair[0])[:_SHOWN])


def _oldest(fates: Sequence[Fate]) -> tuple[str, ...]:
    def version(fate: Fate) -> int:
        found = first_version(fate.trajectory)
        return 0 if found is None else found

    aged: Iterable[Fate] = sorted((fate for fate in fates if fate.trajectory.turns), key=version)
    return tuple(fate.trajectory.trajectory_id for fate in list(aged)[:_SHOWN])
