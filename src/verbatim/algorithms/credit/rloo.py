"""The `rloo` advantage: reward minus the mean of the others'."""

from __future__ import annotations

from verbatim.algorithms.credit.base import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.moments import centered


def rloo_advantage(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`A_i = s_i - mean of the other s = G/(G-1) (s_i - mean(s))` for a group of G (arXiv 2402.14740).

    No rollout is in its own baseline, so the gradient's mean is that of the expected reward. A group of one gives 0.

    Example: rewards `[1, 0, 0]` give `[1, -0.5, -0.5]`.
    """
    size = len(inputs.rollouts)
    return AdvantageOutputs(advantages=[value * size / max(1, size - 1) for value in centered(inputs.rewards)])
