"""Which example comes next. Owns its randomness; has `state_dict`."""

from verbatim.curriculum.schedule import ExampleSchedule, ScheduledExample

__all__ = ["ExampleSchedule", "ScheduledExample"]
