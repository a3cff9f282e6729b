"""Defines messages in OpenAI's chat format, tool calls, and the examples from which conversations start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, Required, TypeAlias, TypedDict, get_args


class FunctionCall(TypedDict):
    """The function part of a tool call, in OpenAI's chat format."""

    name: str
    arguments: str | dict[str, Any]


class MessageToolCall(TypedDict, total=False):
    """A tool call inside an assistant message, in OpenAI's chat format."""

    id: str
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict):
    """One chat message, in OpenAI's chat format."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class StopReason(StrEnum):
    """Why a completion, or a trajectory, ended (reference table in docs/rollouts.md)."""

    STOP = "stop"
    LENGTH = "length"
    MAX_TURNS = "max_turns"
    API_ERROR = "api_error"
    CANCELLED = "cancelled"
    MALFORMED = "malformed"

    @property
    def truncated(self) -> bool:
        """True if something was cut off; this holds for every reason except a natural stop."""
        return self is not StopReason.STOP


ParseStatus: TypeAlias = Literal[
    "ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure", "unknown_tool", "invalid_arguments"
]
PARSE_STATUSES: tuple[str, ...] = get_args(ParseStatus)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One attempt of the model to call a tool, well-formed or not."""

    name: str | None
    """The function's name, or None if it could not be parsed."""
    arguments: Mapping[str, Any] | None
    """The parsed arguments, or None if they could not be parsed."""
    status: ParseStatus = "ok"
    """"ok", or the kind of error."""
    raw: str = ""
    """The sampled text between the call's delimiters, unchanged."""
    id: str = ""
    """Identifies the call within its trajectory; the tool message with the call's result has the same id."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of a dataset: the task of a rollout, and what the environment needs to start the rollout."""

    id: str
    """Id of the example, unique within its environment."""
    env: str = ""
    """The name of the example's environment."""
    messages: tuple[Message, ...] = ()
    """Opening messages, if the dataset has them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas, if the dataset has them."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that the environment needs (the secret, the answer, ...)."""
