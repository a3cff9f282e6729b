"""Where an episode is cut off: the one record of it, with its defaults. The run's file and Python both give these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verbatim.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Where an episode is cut off, and what happens to malformed calls and failing tools."""

    max_turns: int = 16
    """Most turns, sub-agents' included."""
    max_total_completion_tokens: int | None = None
    """Most sampled tokens of all turns together, sub-agents' included; None for no limit."""
    max_context: int = 2048
    """Most tokens of a prompt and its completion together; a chat server has its own limit instead."""
    timeout: float = 600.0
    """Seconds for the whole episode."""
    tool_timeout: float = 60.0
    """Seconds for one tool call."""
    tool_output_limit: int = 16_384
    """Characters of one tool answer."""
    tool_error: Literal["message", "stop"] = "message"
    """Whether a tool that fails or hangs is told to the model, or ends the episode as failed."""
    max_malformed_retries: int = 2
    """Turns in a row that may hold nothing but unreadable calls; one more ends the episode as "malformed"."""

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
