"""Group to advantages: pure functions of one group's rollouts."""

from verbatim.credit.base import AdvantageFunction, AdvantageInputs, AdvantageOutputs, assign_advantages
from verbatim.credit.default import default_advantage

ADVANTAGES: dict[str, AdvantageFunction] = {"default": default_advantage}

__all__ = ["ADVANTAGES", "AdvantageFunction", "AdvantageInputs", "AdvantageOutputs", "assign_advantages"]
