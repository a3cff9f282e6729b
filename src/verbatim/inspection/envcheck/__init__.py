"""Plays an environment without a model before it is trained on, and reports what is wrong with it."""

from verbatim.inspection.envcheck.check import CheckSettings, check_environment
from verbatim.inspection.envcheck.findings import KINDS, CheckFinding, Report

__all__ = ["KINDS", "CheckFinding", "CheckSettings", "Report", "check_environment"]
