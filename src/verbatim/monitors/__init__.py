"""What a run writes down: the console, metrics and trajectories as JSONL, the learning curve."""

from verbatim.monitors.base import Monitor, Monitors
from verbatim.monitors.console import Console
from verbatim.monitors.jsonl import JsonlWriter, read_jsonl
from verbatim.monitors.learning_curve import LearningCurve
from verbatim.monitors.metrics_log import MetricsLog
from verbatim.monitors.trajectory_log import TrajectoryLog, read_trajectories

__all__ = [
    "Console",
    "JsonlWriter",
    "LearningCurve",
    "MetricsLog",
    "Monitor",
    "Monitors",
    "TrajectoryLog",
    "read_jsonl",
    "read_trajectories",
]
