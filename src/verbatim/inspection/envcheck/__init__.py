"""Plays an environment without a model, before any training, and reports the environment's faults."""

from verbatim.inspection.envcheck.check import CheckSettings, check_environment
from verbatim.inspection.envcheck.findings import KINDS, CheckFinding, Report

__all__ = ["KINDS", "CheckFinding", "CheckSettings", "Report", "check_environment"]
