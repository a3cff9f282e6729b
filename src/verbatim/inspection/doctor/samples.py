"""Finds the samples that the `interleaved` strategy builds from a trajectory, and the turns that open new samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verbatim.core.trajectories.extension import OpenSamples
from verbatim.core.trajectories.openings import breaks
from verbatim.core.types import Turn


@dataclass(frozen=True, kw_only=True)
class SampleOpening:
    """A turn that extends none of the samples so far: a break, or the first turn of a further agent."""

    turn: int
    against: tuple[int, ...]
    """The sample with which the turn is compared: indices of the turns that this sample had at that point."""
    shared: int
    """Number of leading ids that the turn's prompt shares with the compared sample; this is the position of the
    break."""
    first_of_agent: bool
    """True for the first turn of an agent, which is not a break."""
    goes_on: bool = False
    """True if the compared sample continues after this turn. Then this turn's prompt did not replace the sample's
    conversation."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a trajectory, the turns that opened them, and their costs."""

    samples: tuple[tuple[int, ...], ...]
    """For each sample, the indices of its turns in order. Turns without sampled tokens are left out."""
    openings: tuple[SampleOpening, ...]
    row_tokens: int
    """Number of tokens to compute if each sample is a separate row."""
    tree_tokens: int
    """Number of tokens to compute in a prefix tree, where each shared prefix is computed once."""


def find_samples(turns: Sequence[Turn]) -> Samples:
    """Find the samples in the same way as training does.

    Example: the turns `([1, 2], [3])` and `([1, 9], [4])`, written (prompt, completion), give the samples `[0]` and
    `[1]` and one opening: turn 1 at position 1. Rows have 3 + 3 tokens to compute, a tree has 5.
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
    """The sample to compare a turn with, and the number of leading ids that the turn's prompt shares with this sample.

    Usually this is the latest sample of the turn's agent, which the turn should have extended. If a different sample of
    the same agent shares more ids, that sample is chosen. If the agent has no sample yet, the sample that shares the
    most ids is chosen.
    """
    own = latest.get(turn.agent)
    if own is None:
        return closest, shared
    with_own = min(turn.num_prompt_tokens, turn.path.shared_with(turns[samples[own][-1]].path))
    if with_own < shared and turns[samples[closest][-1]].agent == turn.agent:
        return closest, shared
    return own, with_own
