"""Builds training samples from trajectories with pure functions over records, without torch and asyncio."""

from verbatim.core.trajectories.age import age, first_version
from verbatim.core.trajectories.ledger import Ledger
from verbatim.core.trajectories.outcome import EVALUATION, TRAINED, TrajectoryOutcome
from verbatim.core.trajectories.samples import STRATEGIES, BuiltSamples, OnBreak, build, build_samples

__all__ = [
    "EVALUATION",
    "STRATEGIES",
    "TRAINED",
    "BuiltSamples",
    "Ledger",
    "OnBreak",
    "TrajectoryOutcome",
    "age",
    "build",
    "build_samples",
    "first_version",
]
