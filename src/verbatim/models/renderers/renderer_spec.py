"""Sends a renderer to another process: as its name and its tokenizer, from which it is made again there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.core.errors import UsageError
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.renderer import Renderer


@dataclass(frozen=True, kw_only=True, eq=False)
class RendererSpec:
    """What one of our renderers is made of."""

    name: str
    """Its family."""
    tools: Literal["hermes"] | None
    """The format in which it writes tools; None: the model's own."""
    settings: Mapping[str, Any]
    """`create_renderer`'s other ones."""
    tokenizer: Any
    """The model's own, without the escaping that renderers put around it."""
    stop_token_ids: tuple[int, ...]
    """The ids that end a turn where it comes from; it must have the same here."""

    def make(self) -> Renderer:
        """The same renderer.

        Raises:
            UsageError: it ends turns differently here: a part of them is read from the model's folder.
        """
        renderer = create_renderer(self.name, self.tokenizer, self.tools, **self.settings)
        if renderer.stop_token_ids != self.stop_token_ids:
            raise UsageError(
                f'renderer "{self.name}" ends turns with the ids {renderer.stop_token_ids} on this host, and with '
                f"{self.stop_token_ids} on the one that sent it; put the model's folder where that host has it: "
                f"{self.tokenizer.name_or_path}"
            )
        return renderer


def renderer_spec(renderer: Any) -> Any:
    """The spec of a renderer over a guarded tokenizer, whose caches stay behind; any other object as it is."""
    escaping: Any = getattr(renderer, "tokenizer", None)
    if type(escaping).__name__ != "EscapingTokenizer":  # by name: its module is heavy, and loaded only where it is used
        return renderer
    return RendererSpec(
        name=renderer.name,
        tools=getattr(renderer, "tool_format", None),
        settings={name: getattr(renderer, name) for name in ("thinking_retention", "history", "later_system")},
        tokenizer=escaping.unescaped,
        stop_token_ids=tuple(renderer.stop_token_ids),
    )
