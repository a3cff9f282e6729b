"""Alarms: rules that look at a window of a run's steps and say what goes wrong, why, and which key to change."""

from collections.abc import Mapping
from typing import Any

from verbatim.monitors.alarms.base import Finding, Rule, StepFigures, Window
from verbatim.monitors.alarms.entropy import EntropyCollapse
from verbatim.monitors.alarms.errors import RepeatedError
from verbatim.monitors.alarms.evaluation_drop import EvaluationDrop
from verbatim.monitors.alarms.filtered import EnvironmentStarves, EverythingFiltered, PoolsDry
from verbatim.monitors.alarms.idle import SamplerIdle, TrainerIdle
from verbatim.monitors.alarms.off_policy import MaskedTokens, MismatchKl, Staleness
from verbatim.monitors.alarms.parting import EvaluationFlat, RewardSuccessGap
from verbatim.monitors.alarms.reward_hacking import RewardHacking
from verbatim.monitors.alarms.tools import PromptBreaks, ToolFormat
from verbatim.monitors.alarms.watch import AlarmWatch

ALARMS: Mapping[str, Any] = {
    "reward_hacking": RewardHacking,
    "reward_success_gap": RewardSuccessGap,
    "evaluation_flat": EvaluationFlat,
    "evaluation_drop": EvaluationDrop,
    "entropy_collapse": EntropyCollapse,
    "mismatch_kl": MismatchKl,
    "masked_tokens": MaskedTokens,
    "staleness": Staleness,
    "tool_format": ToolFormat,
    "prompt_breaks": PromptBreaks,
    "everything_filtered": EverythingFiltered,
    "pools_dry": PoolsDry,
    "environment_starves": EnvironmentStarves,
    "repeated_error": RepeatedError,
    "sampler_idle": SamplerIdle,
    "trainer_idle": TrainerIdle,
}
"""By the name of their table, [monitor.alarms.NAME], whose keys are the knobs. Every one is on by default."""

__all__ = ["ALARMS", "AlarmWatch", "Finding", "Rule", "StepFigures", "Window"]
