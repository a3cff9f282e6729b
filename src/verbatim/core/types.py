"""Exports the records that are passed between stages, from example to micro-batch. Import them from this module."""

from verbatim.core.records.experts import Experts, RoutedExperts
from verbatim.core.records.fields import Bool, Float32
from verbatim.core.records.identity import RolloutIdentity
from verbatim.core.records.kept import KeptSets
from verbatim.core.records.messages import (
    PARSE_STATUSES,
    Example,
    FunctionCall,
    Message,
    MessageToolCall,
    ParseStatus,
    StopReason,
    ToolCall,
)
from verbatim.core.records.micro_batch import MicroBatch, Targets
from verbatim.core.records.samples import TrainingSample
from verbatim.core.records.turn import Turn, TurnTiming
from verbatim.core.token_tree import Ids, Int32
from verbatim.core.trajectories.group import Group
from verbatim.core.trajectories.trajectory import TRAJECTORY_KEYS, Trajectory

__all__ = [
    "PARSE_STATUSES",
    "TRAJECTORY_KEYS",
    "Bool",
    "Example",
    "Experts",
    "Float32",
    "FunctionCall",
    "Group",
    "Ids",
    "Int32",
    "KeptSets",
    "Message",
    "MessageToolCall",
    "MicroBatch",
    "ParseStatus",
    "RolloutIdentity",
    "RoutedExperts",
    "StopReason",
    "Targets",
    "ToolCall",
    "TrainingSample",
    "Trajectory",
    "Turn",
    "TurnTiming",
]
