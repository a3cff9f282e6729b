"""Defines the protocol `Tool`: a schema for the model, and an async call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verbatim.core.errors import RolloutError


class ToolArgumentsError(RolloutError, ValueError):
    """Raised when a call's arguments do not fit the tool. The error's text tells the model how to correct them."""


class ToolFailed(RolloutError):
    """Raised when a tool could not carry out a call. The model reads the full text of the error."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of a tool call. A tool may return a plain string instead."""

    content: str
    """The text that the model reads."""
    done: bool = False
    """True if the episode ends here, so that nothing more is sampled."""
    reward: float | None = None
    """The reward of the turn that made the call, or None."""


@runtime_checkable
class Tool(Protocol):
    """A tool that the model can call. `verbatim.environments.FunctionTool` makes one from a typed function."""

    name: str
    """The tool's name for the model."""
    schema: Mapping[str, Any]
    """The tool's schema, in OpenAI's format for functions: `{"type": "function", "function": {"name", "description",
    "parameters"}}`."""

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Validate the arguments and run the tool.

        Raises:
            ToolArgumentsError: the arguments do not fit the schema; the text tells the model how to correct them.
            ToolFailed: the call could not be carried out. Any other exception counts as a fault of the tool.
        """
