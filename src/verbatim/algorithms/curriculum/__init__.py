"""Chooses the next example and finds groups without a gradient. It has its own random generator and its own
`state_dict`."""

from verbatim.algorithms.curriculum.pools import DifficultyPools, Flatness, PoolRules, flatness
from verbatim.algorithms.curriculum.schedule import ExampleSchedule, ScheduledExample

__all__ = ["DifficultyPools", "ExampleSchedule", "Flatness", "PoolRules", "ScheduledExample", "flatness"]
