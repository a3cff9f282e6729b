"""Defines the lengths and durations of simulated episodes. They are assumptions, not measurements.

A turn is simulated with the length that was drawn for it. The arrays of ids that the code handles are `SCALE` times
shorter, because here only the number of turns matters; what a token costs the orchestrator is measured elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SCALE = 32
VOCAB, CONTEXT = 32_000, 32_768
CALLS, ENDS, FILL = 1, 2, 7
"""`CALLS` is the last id of a completion with a tool call, `ENDS` the last id of a completion without one. All other
ids are `FILL`."""
TABLE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The assumed distributions of episodes. The lengths of completions and the durations of tools are log-normal."""

    turns: tuple[int, int] = (2, 6)
    """Minimum and maximum number of turns per episode."""
    opening: int = 800
    answer: int = 200
    """Number of tokens in the opening messages (`opening`), and in a tool's answer (`answer`)."""
    completion: float = 1200.0
    completion_sigma: float = 0.7
    """Median number of sampled tokens per turn (`completion`), and sigma of its logarithm. The mean is exp(sigma^2 / 2)
    times the median."""
    tool: float = 2.0
    tool_p99: float = 45.0
    """Seconds that a tool takes: the median (`tool`) and the 99th percentile (`tool_p99`)."""
    tool_timeout: float = 60.0
    fails: float = 0.001
    """Share of episodes whose environment raises an exception."""


class Tables:
    """Random draws that are made once, so that looking up an episode's lengths takes no time."""

    def __init__(self, work: Workload, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sigma = math.log(work.tool_p99 / work.tool) / 2.3263
        draws = rng.lognormal(math.log(work.completion), work.completion_sigma, TABLE)
        self.completions = np.clip(draws, 64, 8192).astype(int).tolist()
        self.tools = rng.lognormal(math.log(work.tool), sigma, TABLE).tolist()
        self.turns = rng.integers(work.turns[0], work.turns[1] + 1, TABLE).tolist()
        self.work = work


class Script:
    """The script of one episode: the lengths and durations of its turns."""

    __slots__ = ("_first", "_tables", "context", "fails", "num_turns", "turn")

    def __init__(self, tables: Tables, seed: int) -> None:
        self._tables, self._first = tables, (seed * 2_654_435_761) % (TABLE << 8)
        self.num_turns = tables.turns[self._first % TABLE]
        self.fails = (self._first >> 3) % 100_003 < tables.work.fails * 100_003
        self.turn = 0
        self.context = tables.work.opening
        """Number of tokens in the prompt of the current turn."""

    @property
    def length(self) -> int:
        """Number of tokens that the current turn samples."""
        length: int = self._tables.completions[(self._first + 31 * self.turn) % TABLE]
        return length

    @property
    def is_last(self) -> bool:
        """True if the current turn is the last."""
        return self.turn + 1 >= self.num_turns

    @property
    def tool_seconds(self) -> float:
        """Seconds that the tool takes after the current turn."""
        seconds: float = self._tables.tools[(self._first + 17 * self.turn) % TABLE]
        return seconds

    def go_on(self) -> None:
        """Go on to the next turn, because the tool has answered."""
        self.context += self.length + self._tables.work.answer
        self.turn += 1


def stand_in(num_tokens: float) -> int:
    """The length of the array of ids that stands for this number of tokens."""
    return max(2, round(num_tokens / SCALE))
