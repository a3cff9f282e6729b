"""Computes advantages with pure functions of one group's rollouts."""

from verbatim.algorithms.credit.advantage import (
    Advantage,
    AdvantageFunction,
    AdvantageInputs,
    AdvantageOutputs,
    assign_advantages,
    try_advantage,
)
from verbatim.algorithms.credit.baselines import default_advantage, normalized_advantage, rloo_advantage
from verbatim.algorithms.credit.chunk_returns import chunk_returns_advantage
from verbatim.algorithms.credit.gigpo import gigpo_advantage

ADVANTAGES: dict[str, Advantage] = {
    "default": Advantage(default_advantage, compares_rewards=True),
    "normalized": Advantage(normalized_advantage, compares_rewards=True),
    "rloo": Advantage(rloo_advantage, compares_rewards=True),
    "chunk_returns": Advantage(chunk_returns_advantage),
    "gigpo": Advantage(gigpo_advantage),
}

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "AdvantageFunction",
    "AdvantageInputs",
    "AdvantageOutputs",
    "assign_advantages",
    "try_advantage",
]
