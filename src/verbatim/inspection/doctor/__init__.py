"""Finds breaks of the extension property in logs of any framework, with their causes and costs."""

from verbatim.inspection.doctor.classes import BreakClass
from verbatim.inspection.doctor.diagnosis import Diagnosis, Doctor, Summary
from verbatim.inspection.doctor.logs import (
    FateFormat,
    LogFile,
    LoggedTrajectory,
    is_fate_path,
    known_formats,
    recognise,
)

__all__ = [
    "BreakClass",
    "Diagnosis",
    "Doctor",
    "FateFormat",
    "LogFile",
    "LoggedTrajectory",
    "Summary",
    "is_fate_path",
    "known_formats",
    "recognise",
]
