"""Reads the calls of a family by what the family itself writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import ToolCall
from verbatim.models.renderers.derived_syntax import Render, derive
from verbatim.models.renderers.probe_messages import ASK
from verbatim.models.renderers.responses import unreadable
from verbatim.models.renderers.sampled_text import SampledText, shown
from verbatim.models.renderers.tool_syntax import ToolSyntax


@dataclass(frozen=True)
class WrittenCalls:
    """Reads calls in the syntax that is derived from what a family writes.

    Where that is none we know, a call counts if the family's parser has read it and the family writes it again as it
    was sampled, to the letter.
    """

    render: Render
    """(messages, add_generation_prompt) -> what the family writes."""
    sampled: SampledText
    """Of the family's tokenizer."""
    stops: Sequence[str]
    """The tokens that end a turn."""

    @cached_property
    def syntax(self) -> ToolSyntax | None:
        """The syntax of calls; None if it is none we know."""
        return derive(self.render, self.stops)

    def read(
        self, ids: Sequence[int], attempts: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, Sequence[ToolCall]]:
        """The text behind the calls of sampled ids that begin with the first one, and the calls.

        Args:
            ids: Sampled.
            attempts: What the family's parser made of them.
            tools: The schemas of the tools.
        """
        text = self.sampled.of(ids)
        if self.syntax is not None:
            behind, found = self.syntax.read(text, tools)
        else:
            behind, found = "", tuple(attempts) if self._is_written_so(shown(text), attempts) else ()
        if found:
            return self.sampled.without_control(behind).strip(), found
        return "", [
            unreadable(call.raw, "malformed_structure" if call.status == "ok" else call.status) for call in attempts
        ]

    def _is_written_so(self, text: str, attempts: Sequence[ToolCall]) -> bool:
        """Whether the family writes all of these calls as they stand in a text, and nothing else stands there."""
        if any(call.status != "ok" for call in attempts):
            return False
        functions = [(call.id, {"name": call.name, "arguments": dict(call.arguments or {})}) for call in attempts]
        calls = [{"id": i, "type": "function", "function": function} for i, function in functions]
        try:
            written = self.render([ASK, {"role": "assistant", "content": "", "tool_calls": calls}], False)
        except EnvironmentFault:
            return False
        before, found, behind = written.rpartition(text)
        return bool(found and before) and not self.sampled.without_control(behind).strip()
