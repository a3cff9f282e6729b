"""Applies length penalties: advantages see less reward for long rollouts, or more for short correct ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from verbatim.config.schema import LengthPenaltyConfig
from verbatim.records.equality import are_equal
from verbatim.types import Trajectory

SLOPES = {"tokens": 0.001, "turns": 0.05}
"""What one too many costs, where the configuration does not say."""


def penalised(rollouts: Sequence[Trajectory], penalty: LengthPenaltyConfig) -> list[Trajectory]:
    """The completed rollouts of one group with the rewards that their advantages are to see.

    What was sampled and is not trained costs nothing.

    Example: rewards 1 and 1 for 100 and 700 sampled tokens, with a target of 200 tokens and the slope 0.001: 1 and 0.5.
    """
    rewards = [float(rollout["reward"]) for rollout in rollouts]
    if penalty.type == "tokens":
        costs = [rollout.num_sampled_tokens - _num_untrained_tokens(rollout) for rollout in rollouts]
    else:
        costs = [sum(turn.trained for turn in rollout.turns) for rollout in rollouts]
    if penalty.kind == "relative":
        shaped = with_relative_bonus(rewards, costs)
    else:
        assert penalty.target is not None
        slope = SLOPES[penalty.type] if penalty.slope is None else penalty.slope
        shaped = above_target(rewards, costs, target=penalty.target, slope=slope)
    return [rollout.replace(reward=reward) for rollout, reward in zip(rollouts, shaped, strict=True)]


def _num_untrained_tokens(rollout: Trajectory) -> int:
    return sum(len(turn.completion_ids) for turn in rollout.turns if not turn.trained)


def above_target(rewards: Sequence[float], costs: Sequence[int], *, target: int, slope: float) -> list[float]:
    """`s - slope max(0, c - target)` for each reward s and its cost c.

    Example: `s = 1`, `c = 7` turns, `target = 5`, `slope = 0.05`: 0.9.
    """
    return [reward - slope * max(0, cost - target) for reward, cost in zip(rewards, costs, strict=True)]


def with_relative_bonus(rewards: Sequence[float], costs: Sequence[int]) -> list[float]:
    """`s (1 + bonus)` for the group's best rollouts that cost less than the best ones do on average.

    ```
    correct = (s = max s)
    bonus   = clamp(1 - c / mean_correct(c), 0, 1)          0 where not correct
    ```

    Nothing changes where no reward is above 0, or where the best ones cost nothing.

    Example: rewards `[1, 1, 0]` at costs `[2, 6, 1]`: the best ones cost 4 on average, so the first gets 1.5, and the
    others keep 1 and 0.
    """
    best = max(rewards)
    correct = [are_equal((reward, best)) for reward in rewards]
    usual = statistics.fmean(cost for cost, is_correct in zip(costs, correct, strict=True) if is_correct)
    if best <= 0 or usual == 0:
        return list(rewards)
    return [
        reward * (1 + min(max(1 - cost / usual, 0.0), 1.0)) if is_correct else reward
        for reward, cost, is_correct in zip(rewards, costs, correct, strict=True)
    ]
