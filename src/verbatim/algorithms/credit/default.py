"""The `default` advantage: reward minus the group's mean."""

from __future__ import annotations

from verbatim.algorithms.credit.base import AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.credit.moments import centered


def default_advantage(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`A_i = s_i - mean(s)`, without dividing by the standard deviation (Dr. GRPO, arXiv 2503.20783).

    A group of one gives 0.

    Example: rewards `[1, 0, 0, 0]` give `[0.75, -0.25, -0.25, -0.25]`.
    """
    return AdvantageOutputs(advantages=centered(inputs.rewards))
