"""Reads logs of trajectories of Verbatim and other frameworks."""

from verbatim.doctor.logs.base import Format, LogFile, LoggedTrajectory, Problems, recognise
from verbatim.doctor.logs.lines import VERBATIM, VERIFIERS
from verbatim.doctor.logs.vllm import VllmFormat


def known_formats() -> tuple[Format, ...]:
    """The supported formats, in the order of recognition."""
    return VERBATIM, VERIFIERS, VllmFormat()


__all__ = ["Format", "LogFile", "LoggedTrajectory", "Problems", "known_formats", "recognise"]
