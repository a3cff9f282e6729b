"""Defines the limits of an episode and their defaults, which configuration files and the Python API share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verbatim.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The limits at which an episode is cut off, and what happens after malformed calls and failing tools."""

    max_turns: int = 16
    """Maximum number of turns, including the turns of sub-agents."""
    max_total_completion_tokens: int | None = None
    """Maximum number of sampled tokens in all turns, including the turns of sub-agents; None for no limit."""
    max_context: int = 2048
    """Maximum tokens in a prompt and its completion together; a chat server applies its own limit instead."""
    timeout: float = 600.0
    """Episode timeout in seconds."""
    tool_timeout: float = 60.0
    """Timeout of one tool call in seconds."""
    tool_output_limit: int = 16_384
    """Maximum length of one tool result in characters."""
    tool_error: Literal["message", "stop"] = "message"
    """What happens if a tool fails or hangs: "message" tells the model, "stop" ends the episode as failed."""
    max_malformed_retries: int = 2
    """Maximum number of consecutive turns whose tool calls are all malformed; one more ends the episode as
    "malformed"."""

    def __post_init__(self) -> None:
        above_zero = ("max_turns", "max_total_completion_tokens", "max_context", "timeout", "tool_timeout")
        for name in (*above_zero, "tool_output_limit"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise UsageError(f"{name} = {value!r:.80}; expected a number above 0")
        retries = self.max_malformed_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise UsageError(f"max_malformed_retries = {retries!r:.80}; expected a whole number, at least 0")
        if self.tool_error not in ("message", "stop"):
            raise UsageError(f'tool_error = {self.tool_error!r}; expected "message" or "stop"')
