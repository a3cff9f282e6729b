"""Finds breaks of the extension property in logs of any framework, with their causes and costs."""

from verbatim.doctor.classes import BreakClass
from verbatim.doctor.diagnosis import Diagnosis, Doctor, Summary
from verbatim.doctor.logs import LogFile, LoggedTrajectory, known_formats, recognise

__all__ = ["BreakClass", "Diagnosis", "Doctor", "LogFile", "LoggedTrajectory", "Summary", "known_formats", "recognise"]
