"""The `branching` strategy: every turn is a sample of its own."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.records.turn import Turn


def branching(turns: Sequence[Turn]) -> list[list[int]]:
    """One sample per turn: its prompt untrained, its completion trained.

    Nothing is asked of the prompts, so it fits any chat template. A trajectory of T turns costs the sum of its prompts,
    unless what they share is computed once (packing "tree").

    Returns:
        The places of the turns of each sample.

    Example: turns `([1], [2])` and `([1, 2, 3], [4])` give `[[0], [1]]`: the samples `[1, 2]`, where 2 is trained, and
    `[1, 2, 3, 4]`, where 4 is trained.
    """
    return [[place] for place in range(len(turns))]
