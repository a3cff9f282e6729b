"""Reads logs of trajectories of Verbatim and other frameworks."""

from verbatim.inspection.doctor.logs.base import Format, LogFile, LoggedTrajectory, Problems, recognise
from verbatim.inspection.doctor.logs.fates import FateFormat, is_fate_path
from verbatim.inspection.doctor.logs.lines import VERBATIM, VERIFIERS
from verbatim.inspection.doctor.logs.vllm import VllmFormat


def known_formats() -> tuple[Format, ...]:
    """The supported formats, in the order of recognition."""
    return VERBATIM, VERIFIERS, VllmFormat()


__all__ = [
    "FateFormat",
    "Format",
    "LogFile",
    "LoggedTrajectory",
    "Problems",
    "is_fate_path",
    "known_formats",
    "recognise",
]
