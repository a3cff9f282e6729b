"""Reads logs of trajectories of Verbatim and other frameworks."""

from verbatim.doctor.logs.base import Format, LogFile, LoggedTrajectory, Problems, Unreadable, recognise
from verbatim.doctor.logs.verbatim import VerbatimFormat
from verbatim.doctor.logs.verifiers import VerifiersFormat
from verbatim.doctor.logs.vllm import VllmFormat


def known_formats() -> tuple[Format, ...]:
    """The supported formats, in the order of recognition."""
    return VerbatimFormat(), VerifiersFormat(), VllmFormat()


__all__ = ["Format", "LogFile", "LoggedTrajectory", "Problems", "Unreadable", "known_formats", "recognise"]
