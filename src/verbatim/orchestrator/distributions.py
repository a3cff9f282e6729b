"""Lists one value per rollout of a batch for histograms; rollouts that are filtered out are included."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.trajectories import age
from verbatim.types import Group


def rollout_distributions(groups: Sequence[Group], batch: int) -> dict[str, list[float]]:
    """Rewards, advantages, lengths and ages of the completed rollouts.

    A group that online difficulty filtering dropped has no advantages; everything else of it is counted. Where an
    advantage function gives one to each turn, each of them is a value.

    The groups are those of the batch, credited, and those that were filtered out meanwhile; batches count from 0.
    """
    completed = [t for group in groups for t in group.completed]
    advantages = [t.advantage for t in completed]
    advantages += [turn.advantage for t in completed if t.advantage is None for turn in t.turns]
    return {
        "distribution/reward": [t.reward for t in completed if t.reward is not None],
        "distribution/advantage": [value for value in advantages if value is not None],
        "distribution/completion_tokens": [t.num_sampled_tokens for t in completed],
        "distribution/turns": [len(t.turns) for t in completed],
        "distribution/staleness": [age(t, batch) for t in completed],
    }
