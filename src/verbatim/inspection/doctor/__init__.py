"""Finds breaks of the extension property in the logs of Verbatim and other frameworks, with their causes and costs."""

from verbatim.inspection.doctor.classes import BreakClass
from verbatim.inspection.doctor.diagnosis import Diagnosis, Doctor, Summary
from verbatim.inspection.doctor.logs import (
    LogFile,
    LoggedTrajectory,
    OutcomeFormat,
    detect_format,
    is_outcome_path,
    known_formats,
)

__all__ = [
    "BreakClass",
    "Diagnosis",
    "Doctor",
    "LogFile",
    "LoggedTrajectory",
    "OutcomeFormat",
    "Summary",
    "detect_format",
    "is_outcome_path",
    "known_formats",
]
