"""Defines the staleness rule, which decides for which batches new rollouts may start, and which rollouts are too old to
train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verbatim.config.schema import OrchestratorConfig
from verbatim.core.trajectories import age
from verbatim.core.types import Group

MOST_AGES = 16
"""Ages up to this number have a metric in every step; a higher age has a metric only in steps in which it occurs."""


def newest_batch(version: int, max_async_level: int) -> int:
    """The last batch for which rollouts may start with weights of this version: rollouts for batch n start with
    version `max(0, n - k)` or newer, where k is `max_async_level`.

    Example: with k = 1 and version 2, rollouts may start for batch 3, but not yet for batch 4.
    """
    return version + max_async_level


def too_old(group: Group, batch: int, max_off_policy_steps: int) -> bool:
    """True if no rollout of the group may be trained in this batch, because every completed rollout is older than the
    bound.

    False for a group in which every rollout failed.
    """
    completed = group.completed
    return bool(completed) and all(age(trajectory, batch) > max_off_policy_steps for trajectory in completed)


def age_metrics(ages: Sequence[int], max_off_policy_steps: int) -> dict[str, float]:
    """The metrics `staleness/mean`, `staleness/max`, and the histogram, where `staleness/age/{a}` is the number of
    rollouts of age a.

    Args:
        ages: The ages of a batch's rollouts, without rollouts that are too old. If there are no ages, the result is
            only the histogram.
        max_off_policy_steps: The oldest age that is trained.

    Example: ages 0, 1, 1 with a bound of 2 give mean 2/3, max 1, age/0 1, age/1 2, age/2 0.
    """
    metrics: dict[str, float] = {}
    if ages:
        metrics |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
    found = Counter(ages)
    for old in sorted({*range(min(max_off_policy_steps, MOST_AGES) + 1), *found}):
        metrics[f"staleness/age/{old}"] = found[old]
    return metrics


def capped_settings(orchestrator: OrchestratorConfig) -> list[str]:
    """A sentence for each setting whose effect is capped by the staleness rule or by another setting."""
    level, oldest = orchestrator.max_async_level, orchestrator.max_off_policy_steps
    notes = []
    if oldest < level:
        notes.append(
            f"orchestrator.max_async_level = {level} acts as {oldest}: a rollout that started {level} batches ahead "
            f"would be older than max_off_policy_steps = {oldest} when it is trained"
        )
        level = oldest
    factor = orchestrator.oversampling_factor
    replaces = orchestrator.buffer.online_difficulty_filtering and orchestrator.training_mode == "rl"
    if factor > level + 1 and not replaces:
        ahead = "1 batch" if level == 0 else f"{level + 1} batches"
        notes.append(
            f"orchestrator.oversampling_factor = {factor:g} acts as {level + 1}: with max_async_level = {level} "
            f"rollouts may start for {ahead} at a time, and no group is replaced by another. Raise "
            "max_async_level, or set buffer.online_difficulty_filtering = true, which replaces groups"
        )
        factor = level + 1
    episodes = round(factor * orchestrator.batch_size)
    if orchestrator.oversampling_factor > 1 and episodes > orchestrator.max_concurrent:
        notes.append(
            f"orchestrator.max_concurrent = {orchestrator.max_concurrent} is less than the {episodes} episodes in "
            f"flight that oversampling_factor = {orchestrator.oversampling_factor:g} allows: the others wait"
        )
    return notes
