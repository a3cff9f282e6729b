"""Chooses the next example and filters groups without a gradient; owns its random numbers; has `state_dict`."""

from verbatim.algorithms.curriculum.pools import DifficultyPools, Flatness, PoolRules, flatness
from verbatim.algorithms.curriculum.schedule import ExampleSchedule, ScheduledExample

__all__ = ["DifficultyPools", "ExampleSchedule", "Flatness", "PoolRules", "ScheduledExample", "flatness"]
