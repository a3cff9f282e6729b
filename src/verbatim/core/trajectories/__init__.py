"""Builds training samples from trajectories: pure functions over records; no torch, no asyncio."""

from verbatim.trajectories.age import age, first_version
from verbatim.trajectories.fate import EVALUATION, TRAINED, Fate
from verbatim.trajectories.ledger import Ledger
from verbatim.trajectories.samples import STRATEGIES, BuiltSamples, OnBreak, build, build_samples

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
