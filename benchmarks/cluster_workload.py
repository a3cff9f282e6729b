"""The lengths and times that simulated episodes have. None of it is measured.

A turn is simulated with the length that was drawn for it; the ids that travel are a stand-in, `SCALE` times shorter,
because what a token costs the orchestrator is measured elsewhere and here only the number of turns matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SCALE = 32
VOCAB, CONTEXT = 32_000, 32_768
CALLS, ENDS, FILL = 1, 2, 7
"""Last ids of a completion with a tool call, and without; all other ids."""
TABLE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What episodes are like. Lengths and times are log-normal."""

    turns: tuple[int, int] = (2, 6)
    """Fewest and most turns of an episode."""
    opening: int = 800
    answer: int = 200
    """Tokens of the opening messages, and of a tool's answer."""
    completion: float = 1200.0
    completion_sigma: float = 0.7
    """Median tokens of a turn; the mean is exp(sigma^2 / 2) times as much."""
    tool: float = 2.0
    tool_p99: float = 45.0
    """Seconds that a tool takes: median and 99th percentile."""
    tool_timeout: float = 60.0
    fails: float = 0.001
    """Share of episodes whose environment raises."""


class Tables:
    """Draws that are made once, so that an episode's lengths cost nothing."""

    def __init__(self, work: Workload, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sigma = math.log(work.tool_p99 / work.tool) / 2.3263
        draws = rng.lognormal(math.log(work.completion), work.completion_sigma, TABLE)
        self.completions = np.clip(draws, 64, 8192).astype(int).tolist()
        self.tools = rng.lognormal(math.log(work.tool), sigma, TABLE).tolist()
        self.turns = rng.integers(work.turns[0], work.turns[1] + 1, TABLE).tolist()
        self.work = work


class Script:
    """One episode: what its turns will be."""

    __slots__ = ("_first", "_tables", "context", "fails", "num_turns", "turn")

    def __init__(self, tables: Tables, seed: int) -> None:
        self._tables, self._first = tables, (seed * 2_654_435_761) % (TABLE << 8)
        self.num_turns = tables.turns[self._first % TABLE]
        self.fails = (self._first >> 3) % 100_003 < tables.work.fails * 100_003
        self.turn = 0
        self.context = tables.work.opening
        """Tokens of the prompt of this turn."""

    @property
    def length(self) -> int:
        """Tokens that this turn samples."""
        length: int = self._tables.completions[(self._first + 31 * self.turn) % TABLE]
        return length

    @property
    def is_last(self) -> bool:
        """Whether nothing follows this turn."""
        return self.turn + 1 >= self.num_turns

    @property
    def tool_seconds(self) -> float:
        """What the tool takes after this turn."""
        seconds: float = self._tables.tools[(self._first + 17 * self.turn) % TABLE]
        return seconds

    def go_on(self) -> None:
        """The tool has answered."""
        self.context += self.length + self._tables.work.answer
        self.turn += 1


def stand_in(num_tokens: float) -> int:
    """How many ids travel for so many tokens."""
    return max(2, round(num_tokens / SCALE))
