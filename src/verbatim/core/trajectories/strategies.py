"""Defines the two strategies for putting turns into samples."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.records.turn import Turn
from verbatim.core.trajectories.extension import SampleEnds


def branching(turns: Sequence[Turn]) -> list[list[int]]:
    """One sample per turn: the prompt is untrained, the completion is trained.

    This strategy makes no assumptions about prompts, so it works with any chat template. A trajectory costs as many
    tokens as all its prompts and completions together, unless shared prefixes are computed once (packing "tree").

    Returns:
        For each sample, the indices of its turns.

    Example: turns `([1], [2])` and `([1, 2, 3], [4])` give `[[0], [1]]`: the samples `[1, 2]`, where 2 is trained, and
    `[1, 2, 3, 4]`, where 4 is trained.
    """
    return [[place] for place in range(len(turns))]


def interleaved(turns: Sequence[Turn]) -> list[list[int]]:
    """A turn joins the sample that its prompt extends exactly, or opens a new sample.

    All samples stay open, so agents that alternate, and a parent that continues after a sub-agent, can each continue
    their own sample.

    Returns:
        For each sample, the indices of its turns in order.

    Example: turns `([1], [2])`, `([1, 2, 3], [4])` and `([1, 9], [5])`, written (prompt, completion), give
    `[[0, 1], [2]]`: the samples `[1, 2, 3, 4]`, where 2 and 4 are trained, and `[1, 9, 5]`, where 5 is trained.
    """
    samples: list[list[int]] = []
    ends = SampleEnds()
    for place, turn in enumerate(turns):
        found = ends.longest(turn)
        if found is None:
            ends.open(turn.path)
            samples.append([place])
        else:
            own = samples[found[0]]
            ends.extend(found[0], turns[own[-1]].path, turn.path)
            own.append(place)
    return samples
