"""Reads the calls of a family by what the family itself writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.models.renderers.derived_syntax import Render, derive
from verbatim.models.renderers.responses import unreadable
from verbatim.models.renderers.sampled_text import SampledText
from verbatim.models.renderers.tool_syntax import ToolSyntax


@dataclass(frozen=True)
class WrittenCalls:
    """Reads calls in the syntax that is derived from what a family writes; where that is none we know, none."""

    render: Render
    """(messages, add_generation_prompt) -> what the family writes."""
    sampled: SampledText
    """Of the family's tokenizer."""
    stops: Sequence[str]
    """The tokens that end a turn."""

    @cached_property
    def syntax(self) -> ToolSyntax | None:
        """The syntax of calls; None if it is none we know."""
        return derive(self.render, self.stops, marks=self.sampled.control_tokens)

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
        behind, found = ("", ()) if self.syntax is None else self.syntax.read(text, tools)
        if found:
            return self.sampled.without_control(behind).strip(), found
        return "", [
            unreadable(call.raw, "malformed_structure" if call.status == "ok" else call.status) for call in attempts
        ]
