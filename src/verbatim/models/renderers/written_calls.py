"""Reads the calls of a family by what the family itself writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.models.renderers.derived_syntax import Render, derive
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

    def read(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[ToolCall]] | None:
        """The text behind the calls of sampled ids that begin with the first one, and the calls; None where these are
        none in the family's format.

        Args:
            ids: Sampled.
            tools: The schemas of the tools.
        """
        if self.syntax is None:
            return None
        behind, found = self.syntax.read(self.sampled.of(ids), tools)
        return (self.sampled.without_control(behind).strip(), found) if found else None
