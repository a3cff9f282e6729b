"""Finds by rendering whether a chat format writes tools, calls and answers. Refuses conversations whose tools, calls or
answers would be lost.

A template without tool support ignores tools silently: their schemas are missing from the prompt, and a call becomes an
empty turn. A model would then be trained on episodes in which it never saw its tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.core.errors import ModelError
from verbatim.models.renderers.probe_messages import ASK, NAME, RESULT, SYSTEM, TOOL, VALUE, Render, calling, tried
from verbatim.models.renderers.renderer import Schemas

USE_HERMES = (
    'set tools = "hermes" under [orchestrator.renderer], which writes tools as text of the messages, or give '
    "the model a chat_template.jinja with tools"
)


@dataclass(frozen=True, kw_only=True)
class ToolSupport:
    """Which tool features a chat format can write: schemas, calls, and tools' answers."""

    shown: bool
    """True if the format writes schemas in a conversation that begins with a user's message."""
    shown_below_system: bool
    """True if the format writes schemas in a conversation that begins with a system message."""
    called: bool
    """True if the format writes the calls of earlier turns."""
    read: bool
    """True if the format writes calls in a form that can be parsed from a completion."""
    answered: bool
    """True if the format writes tools' answers."""

    @property
    def complete(self) -> bool:
        """True if no feature is missing, so that environments may have tools."""
        return not self.lacks

    @property
    def lacks(self) -> tuple[str, ...]:
        """The missing features, worded to continue a sentence that begins with "the chat template ..."."""
        showing = self.shown and self.shown_below_system
        where = " without a system message" if self.shown_below_system else " below a system message"
        return (
            *(() if showing else (f"shows no tools{where if self.shown or self.shown_below_system else ''}",)),
            *self._lacks_of_calls,
            *(() if self.answered else (_NO_ANSWERS,)),
        )

    @property
    def _lacks_of_calls(self) -> tuple[str, ...]:
        if not self.called:
            return ("writes no tool calls",)
        return () if self.read else ("writes tool calls in a form that is not known, so that none could be read",)

    def refuse(self, messages: Sequence[Mapping[str, Any]], tools: Schemas, who: str) -> None:
        """Refuse a conversation if `who` would leave out a part of it.

        Missing schemas are allowed if the system message names every tool: the environment then describes its tools
        itself, as some models expect.

        Raises:
            ModelError: a part would be left out; the message names the part, and says what to do.
        """
        calls = any(message.get("tool_calls") for message in messages)
        answers = any(message.get("role") == "tool" for message in messages)
        if self.complete or not (tools or calls or answers):
            return
        below = bool(messages) and messages[0].get("role") == "system"
        lacks = list[str]()
        if tools and not (self.shown_below_system if below else self.shown) and not _described(messages, tools):
            lacks += self.lacks[:1]
        if tools or calls:
            lacks += self._lacks_of_calls
        if (tools or answers) and not self.answered:
            lacks.append(_NO_ANSWERS)
        if lacks:
            names = ", ".join(map(name_of_tool, tools or ())) or "tools"
            raise ModelError(f"{who} {' and '.join(lacks)}, but the conversation has {names}; {USE_HERMES}")


COMPLETE = ToolSupport(shown=True, shown_below_system=True, called=True, read=True, answered=True)
"""The `ToolSupport` of a format that writes everything."""
_NO_ANSWERS = "does not write the answers of tools"


def probe(render: Render, *, reads: bool) -> ToolSupport:
    """Render conversations with unique words and search for them. `reads` becomes `ToolSupport.read`."""
    return ToolSupport(
        shown=NAME in tried(render, [ASK], [TOOL], True),
        shown_below_system=NAME in tried(render, [SYSTEM, ASK], [TOOL], True),
        called=all(_is_called(render, content) for content in ("", "zq content")),
        read=reads,
        answered=all(
            RESULT["content"] in tried(render, [ASK, calling(content), RESULT], [TOOL], True)
            for content in ("", "zq content")
        ),
    )


def _is_called(render: Render, content: str) -> bool:
    # Search for the argument, not the tool's name, which may appear only inside the call's id (Kimi).
    called = [ASK, calling(content)]
    return VALUE in (tried(render, [*called, RESULT], [TOOL], True) or tried(render, called, [TOOL], True))


def _described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    text = messages[0].get("content") if messages and messages[0].get("role") == "system" else None
    return isinstance(text, str) and all(re.search(rf"(?<!\w){re.escape(name_of_tool(t))}(?!\w)", text) for t in tools)


def name_of_tool(tool: Any) -> str:
    """The tool's name in a schema; "" if it has none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
