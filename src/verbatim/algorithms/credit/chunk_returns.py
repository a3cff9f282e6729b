"""The `chunk_returns` advantage: the discounted return from each turn on, discounted once per turn."""

from __future__ import annotations

import math
from typing import Literal

from verbatim.algorithms.credit.advantage import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.moments import mean
from verbatim.config.schema import Fraction
from verbatim.core.errors import ComponentError
from verbatim.core.records.equality import difference
from verbatim.core.types import Trajectory

TURN_REWARDS_SUM = "turn_rewards_sum_to_reward"
"""Key of `Trajectory.info` with which an environment declares that the reward is the sum of the turns' rewards."""


def chunk_returns_advantage(
    inputs: AdvantageInputs, *, gamma: Fraction = 0.95, baseline: Literal["none", "group"] = "none"
) -> AdvantageOutputs:
    """`A_k = G_k` for each turn k, or `G_k` minus the group's mean (chunk returns of IPA, arXiv 2512.24873).

    The group's mean is the mean over trajectories of each trajectory's mean G, so long trajectories do not weigh more.
    An untrained turn, or a turn without sampled tokens, gets 0.

    Example: two rollouts of two turns each with the rewards 1 and 0 and `gamma = 0.5` give `[0.5, 1]` and `[0, 0]`.
    Their means are 0.75 and 0, so `baseline = "group"` gives `[0.125, 0.625]` and `[-0.375, -0.375]`.

    Args:
        inputs: One group.
        gamma: Discount per turn.
        baseline: "none" or "group". With rewards of 0 and 1 and no baseline, a failure has G = 0 and teaches nothing.

    Raises:
        ComponentError: `gamma` is outside [0, 1], or `baseline` has a value not listed above.
    """
    if baseline not in ("none", "group"):
        raise ComponentError(f'chunk_returns: baseline = {baseline!r}; expected "none" or "group"')
    returns = [turn_returns(rollout, gamma) for rollout in inputs.rollouts]
    means = [mean(list(own.values())) for own in returns if own]
    level = mean(means) if means and baseline == "group" else None
    return AdvantageOutputs(
        advantages=[
            [
                0.0 if k not in own else own[k] if level is None else difference(own[k], level)
                for k in range(len(rollout.turns))
            ]
            for rollout, own in zip(inputs.rollouts, returns, strict=True)
        ]
    )


def turn_returns(trajectory: Trajectory, gamma: float) -> dict[int, float]:
    """The return of each trained turn that sampled at least one token, by turn index.

    ```
    G_k = r_k + gamma G_{k+1}          in the order of sampling, including sub-agents' turns; 0 after the last turn
    ```

    r_k is the turn's own reward, or 0 if it has none. An untrained turn, or a turn without sampled tokens, has no
    return and no discount. The own reward r of such a turn counts after the last trained turn before it, `G_k = r_k +
    gamma (r + G_{k+1})`. The last trained turn also gets the trajectory's reward; but if the environment declares that
    the turns' rewards sum to the trajectory's reward, the last trained turn gets only the remainder (such as a length
    penalty).

    Example: three turns, the second of which sampled nothing, a reward of 1 and `gamma = 0.5`: `{0: 0.5, 2: 1.0}`;
    if the second turn has its own reward of 2, `{0: 1.5, 2: 1.0}`.

    Raises:
        ComponentError: `gamma` is outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ComponentError(f"gamma = {gamma}; expected a discount from 0 to 1, for example 0.95")
    own = [turn.reward or 0.0 for turn in trajectory.turns]
    trained = [k for k, turn in enumerate(trajectory.turns) if turn.trained and len(turn.completion_ids)]
    if not trained:
        return {}
    reward = trajectory.reward or 0.0
    if trajectory.info.get(TURN_REWARDS_SUM):
        reward = difference(reward, math.fsum(own))
    own[trained[-1]] += reward
    returns = {}
    ahead = 0.0
    for k in reversed(range(len(own))):
        ahead = own[k] + (gamma if k in trained else 1.0) * ahead
        if k in trained:
            returns[k] = ahead
    return dict(reversed(returns.items()))
