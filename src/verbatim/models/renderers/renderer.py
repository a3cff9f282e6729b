"""Defines the renderer protocol, the only place where text becomes ids and ids become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from verbatim.core.types import Int32, Message, ToolCall

Schemas: TypeAlias = Sequence[Mapping[str, Any]] | None
"""Tool schemas in OpenAI's format; None means that there are no tools."""


@dataclass(frozen=True, kw_only=True)
class ParsedResponse:
    """A completion parsed into a message, for people, tools and environments. Training uses only the ids."""

    content: str
    """The text outside reasoning and tool calls."""
    reasoning_content: str | None = None
    """The thinking, or None if there was none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every attempted call in order, each with its parse status."""
    thought_open: bool = False
    """True if the completion ends inside its thinking."""

    def message(self) -> Message:
        """The assistant message in OpenAI's chat format. It contains only the well-formed calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        calls = [call for call in self.tool_calls if call.status == "ok"]
        if calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": str(c.name), "arguments": dict(c.arguments or {})},
                }
                for c in calls
            ]
        return message


@runtime_checkable
class Renderer(Protocol):
    """A model's chat format. Text from users and tools never becomes a special token.

    A renderer with the attribute `thread_safe = True` is called on a worker thread for long conversations, so that it
    does not block the event loop.
    """

    name: str
    """The family, or "template"."""
    stop_token_ids: tuple[int, ...]
    """The ids that end a sampled turn."""

    def render_ids(
        self, messages: Sequence[Message], tools: Schemas = None, add_generation_prompt: bool = True
    ) -> Int32:
        """The ids of a whole conversation: int32 [L]."""

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Parse a completion. Never raises on anything that a model may sample.

        `tools` provide the arguments' types for formats that write all arguments as bare text.
        """

    def bridge_to_next_turn(
        self, prev_prompt_ids: Int32, prev_completion_ids: Int32, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | None:
        """The next prompt's ids: the previous turn's ids verbatim, the new messages, the generation prompt.

        Returns None if the next prompt has to be rendered from its messages; the next turn then starts a new training
        sample.
        """

    def decode(self, ids: Int32) -> str:
        """The text of ids for display, special tokens included."""


@runtime_checkable
class ReadsGrowingText(Protocol):
    """A renderer that can parse a completion while it is being sampled."""

    def stable_text(self, completion_ids: Int32, prompt_ids: Int32 | None = None) -> tuple[str, str]:
        """The part of an unfinished completion that further tokens cannot change, as (thinking, content)."""
