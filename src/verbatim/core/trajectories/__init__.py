"""Builds training samples from trajectories: pure functions over records; no torch, no asyncio."""

from verbatim.core.trajectories.age import age, first_version
from verbatim.core.trajectories.fate import EVALUATION, TRAINED, Fate
from verbatim.core.trajectories.ledger import Ledger
from verbatim.core.trajectories.samples import STRATEGIES, BuiltSamples, OnBreak, build, build_samples

__all__ = [
    "EVALUATION",
    "STRATEGIES",
    "TRAINED",
    "BuiltSamples",
    "Fate",
    "Ledger",
    "OnBreak",
    "age",
    "build",
    "build_samples",
    "first_version",
]
