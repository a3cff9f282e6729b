"""Reports a run: on the console, as JSONL of metrics and trajectories, as a learning curve, and to services."""

from collections.abc import Mapping

from verbatim.monitors.alarm import Alarm, Detector
from verbatim.monitors.alarm_log import AlarmLog, read_alarms
from verbatim.monitors.base import Monitor, Monitors, RunInfo
from verbatim.monitors.console import Console
from verbatim.monitors.jsonl import JsonlWriter, read_jsonl
from verbatim.monitors.learning_curve import LearningCurve
from verbatim.monitors.metrics_log import MetricsLog
from verbatim.monitors.trajectory_log import TrajectoryLog, read_trajectories

MONITORS: Mapping[str, str] = {
    "mlflow": "verbatim.monitors.mlflow:Mlflow",
    "tensorboard": "verbatim.monitors.tensorboard:Tensorboard",
    "wandb": "verbatim.monitors.wandb:Wandb",
}
"""By the name of their table, [monitor.NAME]. The table's keys are the knobs; called with a `RunInfo` as the run
starts, a component gives a `Monitor`."""

__all__ = [
    "MONITORS",
    "Alarm",
    "AlarmLog",
    "Console",
    "Detector",
    "JsonlWriter",
    "LearningCurve",
    "MetricsLog",
    "Monitor",
    "Monitors",
    "RunInfo",
    "TrajectoryLog",
    "read_alarms",
    "read_jsonl",
    "read_trajectories",
]
