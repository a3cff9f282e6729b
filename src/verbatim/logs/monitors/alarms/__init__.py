"""Alarms: rules that read a window of a run's steps, and report problems with their cause and the key to change."""

from verbatim.logs.monitors.alarms.engine import AlarmRow, AlarmWatch
from verbatim.logs.monitors.alarms.rule import Finding, Rule, StepFigures, Window
from verbatim.logs.monitors.alarms.table import ALARMS

__all__ = ["ALARMS", "AlarmRow", "AlarmWatch", "Finding", "Rule", "StepFigures", "Window"]
