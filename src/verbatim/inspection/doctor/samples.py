"""Finds the samples that `interleaved` builds from a trajectory, and the turns that opened further ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verbatim.core.trajectories.extension import OpenSamples
from verbatim.core.trajectories.openings import breaks
from verbatim.core.types import Turn


@dataclass(frozen=True, kw_only=True)
class SampleOpening:
    """A turn that extends none of the open samples: a break, or the first turn of a further agent."""

    turn: int
    against: tuple[int, ...]
    """Indices of the turns that the compared sample had then."""
    shared: int
    """Leading ids that its prompt shares with that sample: the position of the break."""
    first_of_agent: bool
    """Whether it is no break."""
    goes_on: bool = False
    """Whether the compared sample continues after this turn, so that its conversation was not replaced."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples, breaks and costs of a trajectory."""

    samples: tuple[tuple[int, ...], ...]
    """Indices of the turns of each sample, in order, without turns that sampled nothing."""
    openings: tuple[SampleOpening, ...]
    row_tokens: int
    """Tokens to compute with one row per sample."""
    tree_tokens: int
    """Tokens to compute with shared prefixes computed once."""


def find_samples(turns: Sequence[Turn]) -> Samples:
    """Find samples as training does.

    Example: turns `([1, 2], [3])` and `([1, 9], [4])`, written (prompt, completion), give the samples `[0]` and `[1]`
    and one opening, of turn 1 at position 1: rows compute 3 + 3 tokens, a tree 5.
    """
    opened, breaking = OpenSamples(), set(breaks(turns))
    samples: list[list[int]] = []
    latest: dict[str, int] = {}
    drafts: list[tuple[SampleOpening, int]] = []
    for index, turn in enumerate(turns):
        if not len(turn.completion_ids):
            continue
        found = opened.find(turn)
        number = found.sample
        if number is not None:
            opened.extend(number, turns[samples[number][-1]].path, turn.path)
            samples[number].append(index)
        else:
            if found.closest is not None:
                other, shared = _compared(turn, found.closest, found.shared, turns, samples, latest)
                opening = SampleOpening(
                    turn=index, against=tuple(samples[other]), shared=shared, first_of_agent=index not in breaking
                )
                drafts.append((opening, other))
            number = opened.open(turn.path)
            samples.append([index])
        latest[turn.agent] = number
    return Samples(
        samples=tuple(map(tuple, samples)),
        openings=tuple(replace(o, goes_on=len(samples[other]) > len(o.against)) for o, other in drafts),
        row_tokens=sum(turns[sample[-1]].path.length for sample in samples),
        tree_tokens=opened.num_tokens,
    )


def _compared(
    turn: Turn,
    closest: int,
    shared: int,
    turns: Sequence[Turn],
    samples: Sequence[Sequence[int]],
    latest: dict[str, int],
) -> tuple[int, int]:
    """The sample to compare a turn with, and the number of shared ids.

    It is the latest sample of the turn's agent, which the turn should have extended, or another one of the same agent
    that shares more.
    """
    own = latest.get(turn.agent)
    if own is None:
        return closest, shared
    with_own = min(turn.num_prompt_tokens, turn.path.shared_with(turns[samples[own][-1]].path))
    if with_own < shared and turns[samples[closest][-1]].agent == turn.agent:
        return closest, shared
    return own, with_own
