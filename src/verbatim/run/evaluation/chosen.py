"""Chooses what an evaluation plays: the first examples, each equally often."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.types import Example


def chosen(examples: Sequence[Example], *, episodes: int, most: int | None) -> tuple[Sequence[Example], int]:
    """The examples, and the episodes of each.

    Args:
        examples: Those of the environment.
        episodes: Most episodes in all; where it is fewer than `most`, each example is played once.
        most: Most examples; None: as many as can be played once.

    Example: of 120 examples, 24 episodes play the first 24 once; of 7 examples they play each 3 times, 21 episodes.
    """
    first = examples[: episodes if most is None else most]
    return first, max(1, episodes // len(first))
