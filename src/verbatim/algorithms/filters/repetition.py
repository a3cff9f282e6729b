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

    The share is `1 - sum_turns distinct / sum_turns total`. Distinct ones are counted within each turn, so that an
    agent's recurring call syntax is no repetition. Turns shorter than `ngram` have none, and those that are not
    trained are left out.

    Example: `ngram = 2`, turns `[1, 2, 1, 2, 1]` and `[1, 2]`: the first has 4 bigrams of which 2 are distinct, the
    second has 1. The share is 1 - 3/5 = 0.4.
    """

    threshold: Fraction = 0.6
    """From 0 to 1."""
    ngram: PositiveInt = 8
    """Tokens of one n-gram."""
    action: Action = "drop"
    """"drop" or "monitor"."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ComponentError(f"repetition: threshold = {self.threshold}; expected a share from 0 to 1, such as 0.6")
        if self.ngram < 1:
            raise ComponentError(f"repetition: ngram = {self.ngram}; expected at least 1, for example 8")

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether too many n-grams are repeated."""
        turns = [turn.completion_ids for turn in trajectory.turns if turn.trained]
        total = sum(max(0, len(ids) - self.ngram + 1) for ids in turns)
        if total >= _WORTH_A_BOUND and not self._is_above(total, _fewest_distinct(turns, self.ngram)):
            return False  # as almost always: no need to count exactly
        return self._is_above(total, sum(_num_distinct(ids, self.ngram) for ids in turns))

    def _is_above(self, total: int, distinct: int) -> bool:
        return total > 0 and 1 - distinct / total > self.threshold


def _num_distinct(ids: Int32, ngram: int) -> int:
    """Distinct n-grams of one completion."""
    raw, size = ids.tobytes(), ids.itemsize
    return len({raw[size * at : size * (at + ngram)] for at in range(len(ids) - ngram + 1)})


_WORTH_A_BOUND = 256
"""N-grams of a trajectory from which on a lower bound of the distinct ones is found sooner than their number."""
_KEY_IDS, _KEY_BITS = 3, np.uint64(21)
"""How many ids of an n-gram are in its key, and the bits for each."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: its multiples are far apart."""


def _fewest_distinct(turns: Sequence[Int32], ngram: int) -> int:
    """A lower bound of the n-grams that are distinct within their turn.

    It counts distinct keys, made of the turn and the first ids of the n-gram. Equal n-grams of a turn have equal keys.
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
    begins[(ends[:, None] - 1 - np.arange(ngram - 1)).ravel()] = False  # an n-gram does not reach over its turn's end
    found = np.sort(keys[begins[:count]])
    return 1 + int(np.count_nonzero(found[1:] != found[:-1]))
