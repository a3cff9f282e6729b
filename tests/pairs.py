"""Rows of options in which every pair of values occurs, in place of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairs(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value for each option, so that each two values of two options stand in a row together; about as few
    as there can be, always the same ones.

    >>> pairs("ab", [1, 2], [True, False])
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    rows = [tuple(enumerate(choice)) for choice in itertools.product(*(range(len(values)) for values in options))]
    missing = {pair for row in rows for pair in itertools.combinations(row, 2)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(itertools.combinations(row, 2))))
        missing.difference_update(itertools.combinations(best, 2))
        chosen.append(tuple(options[place][index] for place, index in best))
    return chosen


def all_rows(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations, for `sized(pairs(...), all_rows(...))`."""
    return list(itertools.product(*options))
