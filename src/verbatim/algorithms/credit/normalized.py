"""The `normalized` advantage: reward minus the group's mean, over its standard deviation."""

from __future__ import annotations

from verbatim.algorithms.credit.base import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.moments import standardized
from verbatim.config.schema import NonNegativeFloat
from verbatim.core.errors import ComponentError


def normalized_advantage(inputs: AdvantageInputs, *, eps: NonNegativeFloat = 1e-8) -> AdvantageOutputs:
    """`A_i = (s_i - mean(s)) / (std(s) + eps)`, std of the population (GRPO, arXiv 2402.03300).

    Every group weighs the same, also one where all rewards are nearly equal. A group of one gives 0.

    Example: rewards `[3, 1]` have mean 2 and std 1 and give `[1, -1]`.

    Args:
        inputs: One group.
        eps: Keeps the divisor away from 0.

    Raises:
        ComponentError: a negative `eps`.
    """
    if not eps >= 0:
        raise ComponentError(f"normalized: eps = {eps}; expected a number >= 0, for example 1e-8")
    return AdvantageOutputs(advantages=standardized(inputs.rewards, eps))
