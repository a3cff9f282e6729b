"""Verbatim trains LLM agents by reinforcement learning on multi-turn trajectories, exact to the token.

Importing this package, its configuration or its command line imports neither torch nor transformers.
"""

from verbatim.trajectories import build_samples
from verbatim.types import (
    Example,
    Group,
    Message,
    MicroBatch,
    RolloutIdentity,
    StopReason,
    Targets,
    ToolCall,
    TrainingSample,
    Trajectory,
    Turn,
    TurnTiming,
)

__all__ = [
    "Example",
    "Group",
    "Message",
    "MicroBatch",
    "RolloutIdentity",
    "StopReason",
    "Targets",
    "ToolCall",
    "TrainingSample",
    "Trajectory",
    "Turn",
    "TurnTiming",
    "build_samples",
]

__version__ = "0.1.0"
