"""Applies length penalties: advantages see lower rewards for long rollouts, or higher rewards for short correct
rollouts."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from verbatim.config.schema import LengthPenaltyConfig
from verbatim.core.records.equality import are_equal
from verbatim.core.trajectories.outcome import TRAINED
from verbatim.core.trajectories.samples import turn_outcome
from verbatim.core.types import Trajectory

SLOPES = {"tokens": 0.001, "turns": 0.05}
"""Default penalty for each token or turn above the target."""


def penalised(
    rollouts: Sequence[Trajectory],
    penalty: LengthPenaltyConfig,
    *,
    max_length: int | None = None,
    needs_logprobs: bool = False,
) -> list[Trajectory]:
    """The completed rollouts of one group, with the rewards that advantage functions see.

    Only trained tokens and turns count. Turns that are only context, exceed the maximum length of a sample or lack
    logprobs do not count, nor do tokens outside any turn. A relative bonus compares only rollouts with trained tokens,
    and only these rollouts receive it.

    Args:
        rollouts: The rollouts with their original rewards.
        penalty: The configured penalty.
        max_length: Maximum number of tokens in a sample, or None for no maximum.
        needs_logprobs: True if a turn without logprobs is only context.

    Example: rewards 1 and 1 for 100 and 700 trained tokens become 1 and 0.5, with a target of 200 and the slope 0.001.
    """
    rewards = [float(rollout["reward"]) for rollout in rollouts]
    longest = sys.maxsize if max_length is None else max_length
    costs = []
    for rollout in rollouts:
        trained = [turn for turn in rollout.turns if turn_outcome(turn, longest, needs_logprobs) == TRAINED]
        costs.append(sum(len(turn.completion_ids) for turn in trained) if penalty.type == "tokens" else len(trained))
    if penalty.kind == "relative":
        shaped = list(rewards)
        places = [place for place, cost in enumerate(costs) if cost]
        # No bonus if only rollouts without trained tokens reach the best reward.
        if places and are_equal((max(rewards), max(rewards[place] for place in places))):
            bonus = with_relative_bonus([rewards[place] for place in places], [costs[place] for place in places])
            for place, reward in zip(places, bonus, strict=True):
                shaped[place] = reward
    else:
        assert penalty.target is not None
        slope = SLOPES[penalty.type] if penalty.slope is None else penalty.slope
        shaped = above_target(rewards, costs, target=penalty.target, slope=slope)
    return [rollout.replace(reward=reward) for rollout, reward in zip(rollouts, shaped, strict=True)]


def above_target(rewards: Sequence[float], costs: Sequence[int], *, target: int, slope: float) -> list[float]:
    """`s - slope max(0, c - target)` for each reward s and its cost c.

    Example: `s = 1`, `c = 7` turns, `target = 5` and `slope = 0.05` give 0.9.
    """
    return [reward - slope * max(0, cost - target) for reward, cost in zip(rewards, costs, strict=True)]


def with_relative_bonus(rewards: Sequence[float], costs: Sequence[int]) -> list[float]:
    """`s (1 + bonus)` for each of the group's best rollouts that is shorter than the best rollouts are on average.

    ```
    correct = (s = max s)
    bonus   = clamp(1 - c / mean_correct(c), 0, 1)          0 where not correct
    ```

    Nothing changes if no reward is above 0, or if the best rollouts have length 0.

    Example: rewards `[1, 1, 0]` with lengths `[2, 6, 1]`: the best rollouts have length 4 on average, so the first gets
    1.5, and the others keep 1 and 0.
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
