"""Defines the `Tool` protocol: its schema for the model, and one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verbatim.core.errors import RolloutError


class ToolArgumentsError(RolloutError, ValueError):
    """A call's arguments do not fit the tool; the text tells the model what to do differently."""


class ToolFailed(RolloutError):
    """A tool could not do what was asked; its whole text goes to the model."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The answer of a tool, which may also return a plain string."""

    content: str
    """The text the model reads."""
    done: bool = False
    """Whether it ends the episode: nothing is sampled after it."""
    reward: float | None = None
    """The reward of the turn that made the call."""


@runtime_checkable
class Tool(Protocol):
    """A function that the model can call. `verbatim.environments.FunctionTool` makes one from a typed function."""

    name: str
    """Its name for the model."""
    schema: Mapping[str, Any]
    """OpenAI's function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Validate the arguments and run.

        Raises:
            ToolArgumentsError: the arguments do not fit the schema; its text tells the model what to do differently.
            ToolFailed: it could not do what was asked. Any other exception counts as a fault of the tool.
        """
