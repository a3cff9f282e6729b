"""Aligns a prompt with the earlier sequence that it should extend: finds the changes, and the position in the prompt at
which the earlier sequence ends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

RUN = 4
"""A change ends where this number of consecutive ids are equal again. At the end of the earlier sequence, fewer equal
ids suffice."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Positions `start` to `end` of the earlier sequence were replaced by positions `now_start` to `now_end` of the
    prompt. Either range may be empty."""

    start: int
    end: int
    now_start: int
    now_end: int


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The changes between a prompt and the earlier sequence that the prompt should extend."""

    changes: tuple[Change, ...]
    """The changes, in order. The tokens between two changes are equal in the prompt and the earlier sequence."""
    history_end: int
    """Position in the prompt at which the earlier sequence ends; all tokens from there on are new."""
    meets_again: bool
    """True if the prompt contains the end of the earlier sequence. If False, the position in the prompt at which the
    last change ends is unknown."""


def align(earlier: Sequence[int], prompt: Sequence[int], shared: int) -> Alignment:
    """Align the two sequences from the first difference on. After each change, the alignment resumes at the match that
    skips the fewest ids.

    `shared` is the number of leading ids that the two sequences have in common. If a single deletion or insertion
    explains all differences, this explanation is preferred, so that dropped messages are not reported as rewritten. The
    time is linear in the lengths unless the same ids repeat often.

    Example: `align([1, 2, 7, 8, 3], [1, 2, 3, 4], 2)` finds one change: positions 2 to 4 of the earlier sequence are
    gone. The history ends at position 3 of the prompt, after the id `3`.
    """
    index = _Runs(earlier, shared)
    rest = index.goes_on_at(prompt, shared)
    if rest is not None:
        only = Change(start=shared, end=rest[0], now_start=shared, now_end=rest[1])
        return Alignment(changes=(only,), history_end=rest[1] + len(earlier) - rest[0], meets_again=True)
    changes: list[Change] = []
    at, now = shared, shared
    while at < len(earlier):
        if now < len(prompt) and earlier[at] == prompt[now]:
            at, now = at + 1, now + 1
            continue
        met = index.next_meeting(at, prompt, now)
        if met is None:
            changes.append(Change(start=at, end=len(earlier), now_start=now, now_end=now))
            return Alignment(changes=tuple(changes), history_end=now, meets_again=False)
        changes.append(Change(start=at, end=met[0], now_start=now, now_end=met[1]))
        at, now = met
    return Alignment(changes=tuple(changes), history_end=now, meets_again=True)


class _Runs:
    """Finds the positions at which a given run of `RUN` ids occurs in the earlier sequence."""

    def __init__(self, ids: Sequence[int], start: int) -> None:
        self._ids = ids
        self._places: dict[tuple[int, ...], list[int]] = {}
        for place in range(start, len(ids) - RUN + 1):
            self._places.setdefault(tuple(ids[place : place + RUN]), []).append(place)
        self._endings = {tuple(ids[-n:]): len(ids) - n for n in range(1, RUN) if len(ids) - n >= start}

    def goes_on_at(self, prompt: Sequence[int], shared: int) -> tuple[int, int] | None:
        """If a single deletion or insertion explains every difference, return the position where each sequence resumes
        matching the other, through the end of the earlier sequence; else None."""
        for place in self._places.get(tuple(prompt[shared : shared + RUN]), ()):
            if self._ids[place:] == prompt[shared : shared + len(self._ids) - place]:
                return place, shared
        rest = self._ids[shared:]
        # A rest shorter than `RUN`, such as a lost end-of-turn token, would be found in a later message by chance.
        for now in range(shared + 1, len(prompt) - len(rest) + 1) if len(rest) >= RUN else ():
            if prompt[now : now + RUN] == rest[:RUN] and prompt[now : now + len(rest)] == rest:
                return shared, now
        return None

    def next_meeting(self, at: int, prompt: Sequence[int], now: int) -> tuple[int, int] | None:
        """The position in each sequence of the match that skips the fewest ids; None if it is cheaper to drop the rest
        of the earlier sequence.

        Each id of a dropped rest counts twice, so that an insertion, as an explanation, is preferred over a lost end of
        the history.
        """
        best, found = 2 * (len(self._ids) - at) + 3, None
        later = now
        # A match at position `later` of the prompt skips at least `later - now` ids.
        while later < len(prompt) and later - now < best:
            for place in self._found_in(prompt, later, at):
                skipped = (place - at) + (later - now)
                if skipped < best:
                    best, found = skipped, (place, later)
            later += 1
        return found

    def _found_in(self, prompt: Sequence[int], later: int, at: int) -> list[int]:
        found = []
        places = self._places.get(tuple(prompt[later : later + RUN]), ())
        nearest = bisect_left(places, at)
        if nearest < len(places):
            found.append(places[nearest])
        for ending, place in self._endings.items():
            if place >= at and tuple(prompt[later : later + len(ending)]) == ending:
                found.append(place)
        return found
