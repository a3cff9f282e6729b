"""Chooses the episodes of an evaluation: the first examples, each with the same number of episodes."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.types import Example


def chosen(examples: Sequence[Example], *, episodes: int, most: int | None) -> tuple[Sequence[Example], int]:
    """The examples to play, and the number of episodes per example.

    Args:
        examples: The environment's examples.
        episodes: Maximum number of episodes in total; if it is less than `most`, each example is played once.
        most: Maximum number of examples; None for one example per episode.

    Example: with `episodes=24, most=None`, the first 24 of 120 examples are played once each. If there are only 7
        examples, each is played 3 times, which makes 21 episodes.
    """
    first = examples[: episodes if most is None else most]
    return first, max(1, episodes // len(first))
