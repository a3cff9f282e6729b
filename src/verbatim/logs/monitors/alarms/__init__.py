"""Alarms: rules that look at a window of a run's steps and say what goes wrong, why, and which key to change."""

from collections.abc import Mapping
from typing import Any

from verbatim.logs.monitors.alarms.base import Finding, Rule, StepFigures, Window
from verbatim.logs.monitors.alarms.entropy import EntropyCollapse
from verbatim.logs.monitors.alarms.errors import RepeatedError
from verbatim.logs.monitors.alarms.evaluation_drop import EvaluationDrop
from verbatim.logs.monitors.alarms.filtered import EnvironmentStarves, EverythingFiltered, PoolsDry
from verbatim.logs.monitors.alarms.idle import SamplerIdle, TrainerIdle
from verbatim.logs.monitors.alarms.off_policy import MaskedTokens, MismatchKl, Staleness
from verbatim.logs.monitors.alarms.parting import EvaluationFlat, RewardSuccessGap
from verbatim.logs.monitors.alarms.reward_hacking import RewardHacking
from verbatim.logs.monitors.alarms.tools import PromptBreaks, ToolFormat
from verbatim.logs.monitors.alarms.watch import AlarmWatch

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
