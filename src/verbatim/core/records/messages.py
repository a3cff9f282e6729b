"""Defines messages in OpenAI's chat format, tool calls, and the examples that conversations start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, Required, TypeAlias, TypedDict, get_args


class FunctionCall(TypedDict):
    """The function part of a tool call, as OpenAI's chat format has it."""

    name: str
    arguments: str | dict[str, Any]


class MessageToolCall(TypedDict, total=False):
    """A tool call inside an assistant message, as OpenAI's chat format has it."""

    id: str
    type: Literal["function"]
    function: Required[FunctionCall]


class Message(TypedDict):
    """One chat message, as OpenAI's chat format has it."""

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
        """Whether something was cut off: everything but a natural stop."""
        return self is not StopReason.STOP


ParseStatus: TypeAlias = Literal[
    "ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure", "unknown_tool", "invalid_arguments"
]
PARSE_STATUSES: tuple[str, ...] = get_args(ParseStatus)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One attempt of the model to call a tool, well-formed or not."""

    name: str | None
    """The function's name; None where it could not be read."""
    arguments: Mapping[str, Any] | None
    """The parsed arguments; None where they could not be read."""
    status: ParseStatus = "ok"
    """"ok", or what is wrong with it."""
    raw: str = ""
    """The text between the call's delimiters, as sampled."""
    id: str = ""
    """Identifies the call inside its trajectory; the tool message answers to it."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of a data set: what a rollout is about, and what its environment needs to start it."""

    id: str
    """Unique inside its environment."""
    env: str = ""
    """The name of its environment."""
    messages: tuple[Message, ...] = ()
    """Opening messages, where the data set has them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas, where the data set has them."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the environment needs (the secret, the answer, ...). JSON values."""
