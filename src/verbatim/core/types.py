"""The records passed between stages, from example to micro-batch; import them from here."""

from verbatim.records.experts import Experts, RoutedExperts
from verbatim.records.fields import Bool, Float32
from verbatim.records.identity import RolloutIdentity
from verbatim.records.messages import (
    PARSE_STATUSES,
    Example,
    FunctionCall,
    Message,
    MessageToolCall,
    ParseStatus,
    StopReason,
    ToolCall,
)
from verbatim.records.micro_batch import MicroBatch, Targets
from verbatim.records.samples import TrainingSample
from verbatim.records.turn import Turn, TurnTiming
from verbatim.token_tree import Ids, Int32
from verbatim.trajectories.group import Group
from verbatim.trajectories.trajectory import TRAJECTORY_KEYS, Trajectory

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
