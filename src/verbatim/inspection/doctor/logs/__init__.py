"""Reads trajectory logs of Verbatim and other frameworks."""

from verbatim.inspection.doctor.logs.lines import VERBATIM, VERIFIERS
from verbatim.inspection.doctor.logs.log_file import Format, LogFile, LoggedTrajectory, Problems, detect_format
from verbatim.inspection.doctor.logs.outcomes import OutcomeFormat, is_outcome_path
from verbatim.inspection.doctor.logs.vllm import VllmFormat


def known_formats() -> tuple[Format, ...]:
    """The supported formats, in the order in which they are tried."""
    return VERBATIM, VERIFIERS, VllmFormat()


__all__ = [
    "Format",
    "LogFile",
    "LoggedTrajectory",
    "OutcomeFormat",
    "Problems",
    "detect_format",
    "is_outcome_path",
    "known_formats",
]
