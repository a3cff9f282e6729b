"""The `gigpo` advantage: compares the episode with its group, and each turn with turns in the same state."""

from __future__ import annotations

from typing import Literal

from verbatim.algorithms.credit.advantage import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.chunk_returns import turn_returns
from verbatim.algorithms.credit.moments import centered, standardized
from verbatim.config.schema import Fraction, NonNegativeFloat
from verbatim.core.errors import ComponentError


def gigpo_advantage(
    inputs: AdvantageInputs,
    *,
    gamma: Fraction = 0.95,
    w_step: NonNegativeFloat = 1.0,
    scale: Literal["std", "none"] = "std",
) -> AdvantageOutputs:
    """`A_t = (R - mean_group(R)) / F_group + w_step (G_t - mean_state(G)) / F_state` (GiGPO, arXiv 2505.10978).

    G_t is the turn's return (`turn_returns`). mean_state is the mean over all turns of the group, in any rollout, with
    the same `state_key`. F_group and F_state are the standard deviations over the same sets as mean_group and
    mean_state, or 1 with `scale = "none"`. A set of equal values, a state seen once and a turn without a state key
    contribute 0. A turn without sampled tokens gets 0.

    Example: two rollouts with the rewards 1 and 0; the first acts in states a and b, the second only in a. With
    `gamma = 0.5` the returns are `[0.5, 1]` and `[0]`. With `scale = "none"` the episodes differ from their mean by 0.5
    and -0.5, and the turns in state a by 0.25 and -0.25, so the advantages are `[0.75, 0.5]` and `[-0.75]`. With "std":
    `[2, 1]` and `[-2]`.

    Args:
        inputs: One group of an environment that sets `state_key`.
        gamma: Discount per turn.
        w_step: Weight of the comparison within states.
        scale: "std" or "none".

    Raises:
        ComponentError: a parameter is outside its range.
    """
    if not w_step >= 0:
        raise ComponentError(f"gigpo: w_step = {w_step}; expected a number >= 0, for example 1.0")
    if scale not in ("std", "none"):
        raise ComponentError(f'gigpo: scale = {scale!r}; expected "std" or "none"')
    compare = standardized if scale == "std" else centered
    episodes = compare(inputs.rewards)
    returns = [turn_returns(rollout, gamma) for rollout in inputs.rollouts]

    states: dict[str, list[tuple[int, int]]] = {}
    for i, (rollout, own) in enumerate(zip(inputs.rollouts, returns, strict=True)):
        for k in own:
            key = rollout.turns[k].state_key
            if key is not None:
                states.setdefault(key, []).append((i, k))
    steps: dict[tuple[int, int], float] = {}
    for places in states.values():
        steps.update(zip(places, compare([returns[i][k] for i, k in places]), strict=True))

    return AdvantageOutputs(
        advantages=[
            [episodes[i] + w_step * steps.get((i, k), 0.0) if k in own else 0.0 for k in range(len(rollout.turns))]
            for i, (rollout, own) in enumerate(zip(inputs.rollouts, returns, strict=True))
        ]
    )
