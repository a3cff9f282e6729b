"""Defines the renderer protocol: messages to ids and back, the one place where text and tokens meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from verbatim.core.types import Int32, Message, ToolCall

Schemas: TypeAlias = Sequence[Mapping[str, Any]] | None
"""Schemas of tools, in OpenAI's format; None without tools."""


@dataclass(frozen=True, kw_only=True)
class ParsedResponse:
    """A completion, read as a message. Ids stay the truth; this is for people, tools and environments."""

    content: str
    """The text beside reasoning and tool calls."""
    reasoning_content: str | None = None
    """The thinking, if there was any."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every attempted call in order, each with its parse status."""
    thought_open: bool = False
    """Whether the completion ends inside of its thinking."""

    def message(self) -> Message:
        """The assistant message, in OpenAI's chat format; only well-formed calls are in it."""
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
    """A model's chat format. Text of users and tools never becomes a special token.

    One with an attribute `thread_safe = True` renders long conversations on a thread, beside the event loop's own.
    """

    name: str
    """The family, or "template"."""
    stop_token_ids: tuple[int, ...]
    """A sampled turn ends with one of these."""

    def render_ids(
        self, messages: Sequence[Message], tools: Schemas = None, add_generation_prompt: bool = True
    ) -> Int32:
        """The ids of a whole conversation: int32 [L]."""

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Read a completion; never raises on what a model may sample.

        The schemas say what type an argument is where the format writes all of them as bare text.
        """

    def bridge_to_next_turn(
        self, prev_prompt_ids: Int32, prev_completion_ids: Int32, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | None:
        """The next prompt, as the previous turn's ids verbatim plus the new messages and the generation prompt.

        None where the next prompt has to be rendered anew, and the next turn starts a new training sample.
        """

    def decode(self, ids: Int32) -> str:
        """Text for people, special tokens included."""


@runtime_checkable
class ReadsGrowingText(Protocol):
    """A renderer that can read a completion while it grows."""

    def stable_text(self, completion_ids: Int32, prompt_ids: Int32 | None = None) -> tuple[str, str]:
        """Thinking and content with which every completion that begins with these ids is read; may be less than what is
        there already, never more."""
