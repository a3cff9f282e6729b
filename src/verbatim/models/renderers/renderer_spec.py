"""Sends a renderer to another process as name, settings and tokenizer, and re-creates it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.core.errors import UsageError
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.renderer import Renderer


@dataclass(frozen=True, kw_only=True, eq=False)
class RendererSpec:
    """The arguments that create one of our renderers."""

    name: str
    """The family, or "template"."""
    tools: Literal["hermes"] | None
    """The format of tools; None means the model's own format."""
    settings: Mapping[str, Any]
    """The remaining keyword arguments of `create_renderer`."""
    tokenizer: Any
    """The model's own tokenizer, without the escaping that renderers wrap around it."""
    stop_token_ids: tuple[int, ...]
    """The ids that end a turn in the sending process. They have to be the same in the receiving process."""

    def make(self) -> Renderer:
        """Re-create the renderer.

        Raises:
            UsageError: the renderer ends turns with different ids here. Some ids come from the model's folder, which
                may differ between hosts.
        """
        renderer = create_renderer(self.name, self.tokenizer, self.tools, **self.settings)
        if renderer.stop_token_ids != self.stop_token_ids:
            raise UsageError(
                f'renderer "{self.name}" ends turns with the ids {renderer.stop_token_ids} on this host, and with '
                f"{self.stop_token_ids} on the host that sent the renderer; put the model's folder at the same path on "
                f"both hosts: {self.tokenizer.name_or_path}"
            )
        return renderer


def renderer_spec(renderer: Any) -> Any:
    """The spec of one of our renderers, without its caches. Any other object is returned unchanged."""
    escaping: Any = getattr(renderer, "tokenizer", None)
    if type(escaping).__name__ != "EscapingTokenizer":  # compared by name, because importing its module is slow
        return renderer
    return RendererSpec(
        name=renderer.name,
        tools=getattr(renderer, "tool_format", None),
        settings={name: getattr(renderer, name) for name in ("thinking_retention", "history", "later_system")},
        tokenizer=escaping.unescaped,
        stop_token_ids=tuple(renderer.stop_token_ids),
    )
