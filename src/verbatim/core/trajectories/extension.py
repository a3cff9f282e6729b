"""Finds the open sample that a prompt extends exactly, or else the position at which the prompt first differs from the
closest open sample."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.records.turn import Turn
from verbatim.core.token_tree import Segment, TokenPath


@dataclass(frozen=True, kw_only=True)
class Extension:
    """How a prompt relates to the open samples."""

    sample: int | None
    """The number of the open sample that is the longest exact prefix of the prompt, or None at a break."""
    shared: int
    """Number of ids that the prompt shares with the sample it extends (the sample's whole length), or, at a break, with
    the closest sample."""
    closest: int | None
    """The number of the sample to which `shared` refers, or None if no sample is open."""


class SampleEnds:
    """The ends of the samples that a turn may extend; a sample ends with the completion of its last turn.

    All ids of a trajectory were compared once, when they were added to its `TokenTree`, so equal prefixes are the same
    segments. A lookup walks from the end of a prompt to the root and visits each segment at most once, for any number
    of open samples.
    """

    def __init__(self) -> None:
        self._ends: dict[Segment, list[tuple[int, int]]] = {}
        """For each segment, (length, number) of each sample that ends in it."""
        self._count = 0

    def longest(self, turn: Turn) -> tuple[int, int] | None:
        """(number, length) of the longest open sample that is an exact prefix of the turn's prompt; None at a break.

        A shorter sample must not win over a longer sample, because the sampled tokens of the longer sample would then
        count as tokens of the environment. Among equally long samples the earliest wins.
        """
        ends, length = self._ends, turn.path.length - len(turn.completion_ids)
        segment = turn.path.segment_at(length)
        while segment is not None:
            if segment in ends:
                longest, number = 0, -1
                for end, candidate in ends[segment]:
                    if longest < end <= length or (end == longest and candidate < number):
                        longest, number = end, candidate
                if longest:
                    return number, longest
            length, segment = segment.start, segment.parent
        return None

    def open(self, path: TokenPath) -> int:
        """Open a new sample, and return its number."""
        number = self._count
        self._count += 1
        self._mark(path, number)
        return number

    def extend(self, number: int, before: TokenPath, path: TokenPath) -> None:
        """Extend the sample that ended with `before` to `path`."""
        assert before.segment is not None
        self._ends[before.segment].remove((before.length, number))
        self._mark(path, number)

    def _mark(self, path: TokenPath, number: int) -> None:
        assert path.segment is not None
        self._ends.setdefault(path.segment, []).append((path.length, number))


class OpenSamples(SampleEnds):
    """Same as `SampleEnds`, but also finds the closest sample at a break.

    Example: with the samples `[1, 2]` and `[1, 2, 3]`, the prompt `[1, 2, 3, 9]` extends the second sample; the prompt
    `[1, 5]` extends no sample and shares 1 id with the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reach: dict[Segment, tuple[int, int]] = {}
        """For each segment, the largest length that a sample reaches in it, and the number of the first sample that
        reaches this length."""

    def find(self, turn: Turn) -> Extension:
        """The sample that the turn extends, or the closest sample."""
        found = self.longest(turn)
        if found is not None:
            return Extension(sample=found[0], shared=found[1], closest=found[0])
        length = turn.num_prompt_tokens
        segment = turn.path.segment_at(length)
        shared, closest = 0, 0 if self._count else None
        while segment is not None:
            reach = self._reach.get(segment)
            if reach is not None and (closest is None or min(reach[0], length) > shared):
                shared, closest = min(reach[0], length), reach[1]
            length, segment = segment.start, segment.parent
        return Extension(sample=None, shared=shared, closest=closest)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all samples together; shared prefixes count once."""
        return sum(length - segment.start for segment, (length, _) in self._reach.items())

    def _mark(self, path: TokenPath, number: int) -> None:
        super()._mark(path, number)
        segment, length = path.segment, path.length
        while segment is not None and self._reach.get(segment, (0, 0))[0] < length:
            self._reach[segment] = (length, number)
            length, segment = segment.start, segment.parent
