"""Finds breaks: turns that open a training sample although their agent has sampled before.

Metrics, files, the viewer, alarms, the doctor and `on_break = "error"` all use this definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from verbatim.core.records.turn import Turn
from verbatim.core.trajectories.strategies import interleaved


def breaks(turns: Sequence[Turn]) -> list[int]:
    """The indices of the turns with a break, in order.

    A turn without sampled tokens is in no sample. An agent's first turn is not a break, because it has no history that
    could have changed. Breaks are computed with the interleaved strategy, even in runs with another strategy.

    Example: three turns of the agents `main`, `sub/1` and `main`, where the last turn extends the first, give `[]`. If
    the last turn extends neither of the two earlier turns, the result is `[2]`.
    """
    kept = [place for place, turn in enumerate(turns) if len(turn.completion_ids)]
    samples = interleaved([turns[place] for place in kept])
    return spoken_before((kept[sample[0]] for sample in samples), turns)


def spoken_before(openings: Iterable[int], turns: Sequence[Turn]) -> list[int]:
    """The indices in `openings` of turns whose agent had already sampled in an earlier turn, in order."""
    found, agents, opens = [], set[str](), set(openings)
    for place, turn in enumerate(turns):
        if place in opens and turn.agent in agents:
            found.append(place)
        if len(turn.completion_ids):
            agents.add(turn.agent)
    return found


def is_one_list(turns: Sequence[Turn]) -> bool:
    """True if each turn extends the turn before it, so that the last turn's context contains all turns."""
    return all(turn.extends(before) for before, turn in pairwise(turns))
