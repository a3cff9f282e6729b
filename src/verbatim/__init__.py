"""Verbatim trains LLM agents by reinforcement learning on multi-turn trajectories, exact to the token.

Importing this package, its configuration or its command line imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verbatim.core.trajectories import build_samples
from verbatim.core.types import (
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
from verbatim.run import run  # replaces the package, which stays importable by the names of its modules

if TYPE_CHECKING:
    from verbatim.run.entry import train as train
    from verbatim.run.result import RunResult as RunResult

__all__ = [
    "Example",
    "Group",
    "Message",
    "MicroBatch",
    "RolloutIdentity",
    "RunResult",
    "StopReason",
    "Targets",
    "ToolCall",
    "TrainingSample",
    "Trajectory",
    "Turn",
    "TurnTiming",
    "build_samples",
    "run",
    "train",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("RunResult", "train"):
        return getattr(importlib.import_module("verbatim.run.entry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
