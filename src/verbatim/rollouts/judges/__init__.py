"""Judges: models behind an HTTP endpoint that give an episode its reward."""

from verbatim.rollouts.judges.judge import Judge
from verbatim.rollouts.judges.judged import Judged
from verbatim.rollouts.judges.reward_model import RewardModel

__all__ = ["Judge", "Judged", "RewardModel"]
