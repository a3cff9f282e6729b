"""Reports a run on the console, as JSON lines and Parquet files, as a learning curve, and to services such as W&B."""

from collections.abc import Mapping

from verbatim.logs.monitors.alarm import Alarm, Detector
from verbatim.logs.monitors.alarm_log import AlarmLog, read_alarms
from verbatim.logs.monitors.console import Console
from verbatim.logs.monitors.jsonl import JsonlWriter, read_jsonl
from verbatim.logs.monitors.learning_curve import LearningCurve
from verbatim.logs.monitors.metrics_log import MetricsLog
from verbatim.logs.monitors.monitor import Monitor, Monitors, RunInfo
from verbatim.logs.monitors.trajectory_log import TrajectoryLog, read_trajectories

MONITORS: Mapping[str, str] = {
    "mlflow": "verbatim.logs.monitors.mlflow:Mlflow",
    "tensorboard": "verbatim.logs.monitors.tensorboard:Tensorboard",
    "wandb": "verbatim.logs.monitors.wandb:Wandb",
}
"""Import path of each bundled service, by the name of its table, [monitor.NAME]. The keys of the table are the
parameters of the component. When the run starts, the component is called with a `RunInfo` and returns a `Monitor`."""

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
