"""The `repetition` filter: flags trajectories that repeat the same few tokens inside a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.algorithms.filters.filter import Action
from verbatim.config.schema import Fraction, PositiveInt
from verbatim.core.errors import ComponentError
from verbatim.core.types import Int32, Trajectory


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Flags a trajectory when the share of repeated n-grams is above `threshold`.

    The share is `1 - sum_turns distinct / sum_turns total`. N-grams are compared within a turn only, so an agent's
    recurring call syntax does not count as repetition. Untrained turns, and turns shorter than `ngram`, do not count.

    Example: `ngram = 2`, turns `[1, 2, 1, 2, 1]` and `[1, 2]`: the first has 4 bigrams of which 2 are distinct, the
    second has 1. The share is 1 - 3/5 = 0.4.
    """

    threshold: Fraction = 0.6
    """Maximum share of repeated n-grams, from 0 to 1."""
    ngram: PositiveInt = 8
    """Length of an n-gram in tokens."""
    action: Action = "drop"
    """What happens to flagged trajectories: "drop" or "monitor"."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ComponentError(
                f"repetition: threshold = {self.threshold}; expected a fraction from 0 to 1, such as 0.6"
            )
        if self.ngram < 1:
            raise ComponentError(f"repetition: ngram = {self.ngram}; expected at least 1, for example 8")

    def __call__(self, trajectory: Trajectory) -> bool:
        """True if too many n-grams are repeated."""
        turns = [turn.completion_ids for turn in trajectory.turns if turn.trained]
        total = sum(max(0, len(ids) - self.ngram + 1) for ids in turns)
        if total >= _WORTH_A_BOUND and not self._is_above(total, _fewest_distinct(turns, self.ngram)):
            return False  # in the common case the lower bound decides, and exact counting is not needed
        return self._is_above(total, sum(_num_distinct(ids, self.ngram) for ids in turns))

    def _is_above(self, total: int, distinct: int) -> bool:
        return total > 0 and 1 - distinct / total > self.threshold


def _num_distinct(ids: Int32, ngram: int) -> int:
    """Number of distinct n-grams in one completion."""
    raw, size = ids.tobytes(), ids.itemsize
    return len({raw[size * at : size * (at + ngram)] for at in range(len(ids) - ngram + 1)})


_WORTH_A_BOUND = 256
"""In a trajectory with at least this many n-grams, computing the lower bound is faster than counting exactly."""
_KEY_IDS, _KEY_BITS = 3, np.uint64(21)
"""How many ids of an n-gram are in its key, and bits per id; 3 x 21 bits fit into 64."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: its multiples are spread out, so keys of different turns rarely collide."""


def _fewest_distinct(turns: Sequence[Int32], ngram: int) -> int:
    """A lower bound for the number of n-grams that are distinct within their turn.

    The function counts distinct keys, which are made of the turn and the first ids of the n-gram. Equal n-grams of a
    turn have equal keys, so collisions can only lower the count.
    """
    turns = [ids for ids in turns if len(ids) >= ngram]
    if not turns:
        return 0
    ends = np.cumsum([len(ids) for ids in turns])
    ids = np.concatenate(turns).astype(np.uint64)
    count = len(ids) - ngram + 1
    keys = np.repeat(np.arange(len(turns), dtype=np.uint64) * _SPREAD, np.diff(ends, prepend=0))[:count]
    for place in range(min(ngram, _KEY_IDS)):
        keys ^= ids[place : place + count] << (_KEY_BITS * np.uint64(place))
    begins = np.ones(len(ids), dtype=np.bool_)
    begins[(ends[:, None] - 1 - np.arange(ngram - 1)).ravel()] = False  # no n-gram crosses the end of its turn
    found = np.sort(keys[begins[:count]])
    return 1 + int(np.count_nonzero(found[1:] != found[:-1]))
