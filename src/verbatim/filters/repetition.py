"""The `repetition` filter: flags trajectories that repeat the same few tokens inside a turn."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.config.schema import Fraction, PositiveInt
from verbatim.errors import ComponentError
from verbatim.filters.base import Action
from verbatim.types import Int32, Trajectory


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
        counts = [_count(turn.completion_ids, self.ngram) for turn in trajectory.turns if turn.trained]
        total, distinct = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        return total > 0 and 1 - distinct / total > self.threshold


def _count(ids: Int32, ngram: int) -> tuple[int, int]:
    """The n-grams of one completion, and how many of them are distinct."""
    total = max(0, len(ids) - ngram + 1)
    raw, size = ids.tobytes(), ids.itemsize
    return total, len({raw[size * at : size * (at + ngram)] for at in range(total)})
