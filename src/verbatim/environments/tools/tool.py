"""Defines the `Tool` protocol: a schema for the model, and an async call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verbatim.core.errors import RolloutError


class ToolArgumentsError(RolloutError, ValueError):
    """A call's arguments do not fit the tool; the error's text tells the model how to correct them."""


class ToolFailed(RolloutError):
    """A tool could not carry out a call; the model reads the error's full text."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of a tool call; a tool may also return a plain string."""

    content: str
    """The text the model reads."""
    done: bool = False
    """True if the episode ends here: nothing more is sampled."""
    reward: float | None = None
    """The reward of the turn that made the call."""


@runtime_checkable
class Tool(Protocol):
    """A tool that the model can call. `verbatim.environments.FunctionTool` makes one from a typed function."""

    name: str
    """The tool's name for the model."""
    schema: Mapping[str, Any]
    """OpenAI's function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Validate the arguments and run the tool.

        Raises:
            ToolArgumentsError: the arguments do not fit the schema; the text tells the model how to correct them.
            ToolFailed: the call could not be carried out. Any other exception counts as a fault of the tool.
        """
