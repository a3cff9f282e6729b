"""The advantages that compare a rollout's reward with the rewards of its group: `default`, `rloo` and `normalized`."""

from __future__ import annotations

from verbatim.algorithms.credit.advantage import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.moments import centered, standardized
from verbatim.config.schema import NonNegativeFloat
from verbatim.core.errors import ComponentError


def default_advantage(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`A_i = s_i - mean(s)`, without dividing by the standard deviation (Dr. GRPO, arXiv 2503.20783).

    A group of one gives 0.

    Example: rewards `[1, 0, 0, 0]` give `[0.75, -0.25, -0.25, -0.25]`.
    """
    return AdvantageOutputs(advantages=centered(inputs.rewards))


def rloo_advantage(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`A_i = s_i - mean of the other s = G/(G-1) (s_i - mean(s))` for a group of G (arXiv 2402.14740).

    A rollout is not part of its own baseline, so the gradient estimate is unbiased. A group of one gives 0.

    Example: rewards `[1, 0, 0]` give `[1, -0.5, -0.5]`.
    """
    size = len(inputs.rollouts)
    return AdvantageOutputs(advantages=[value * size / max(1, size - 1) for value in centered(inputs.rewards)])


def normalized_advantage(inputs: AdvantageInputs, *, eps: NonNegativeFloat = 1e-8) -> AdvantageOutputs:
    """`A_i = (s_i - mean(s)) / (std(s) + eps)` with the population std (GRPO, arXiv 2402.03300).

    Every group gets the same weight, even one whose rewards are nearly equal. A group of one gives 0.

    Example: rewards `[3, 1]` have mean 2 and std 1 and give `[1, -1]`.

    Args:
        inputs: One group.
        eps: Added to the divisor to keep it away from 0.

    Raises:
        ComponentError: `eps` is negative.
    """
    if not eps >= 0:
        raise ComponentError(f"normalized: eps = {eps}; expected a number >= 0, for example 1e-8")
    return AdvantageOutputs(advantages=standardized(inputs.rewards, eps))
