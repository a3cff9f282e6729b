"""Finds stop strings in sampled ids. A completion ends with the token that completes one.

The ids stay whole tokens: the one that completes a stop string is part of the completion, with its logprob, even where
its text goes on. Only the text of the answer is cut, before the stop string.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from verbatim.core.types import Int32
from verbatim.inference.sampler import Watch

Decode = Callable[[Int32], str]
"""The text of ids. The text of a prefix is a prefix of the text, but for U+FFFD at its end."""
_BYTES_OF_A_CHARACTER = 4
_MARGIN = 8
"""Characters at the beginning of a text that may be others than in the whole: the rest of one that was cut."""
_FIRST_LOOK = 16
"""Ids that have enough text for most stop strings."""


def find_stop(ids: Int32, stops: Sequence[str], decode: Decode) -> tuple[int, str] | None:
    """The first stop string in the text of a completion.

    Returns:
        The number of ids up to the one that completes it, and the string; of several that this id completes, the one
        that begins first. None: the text holds none.

    Example: the ids of "ab", "c;", "d" with the stops [";", "d"] give (2, ";").
    """
    if not stops or not len(ids) or _first(decode(ids), stops) is None:
        return None

    def has_stop(size: int) -> bool:
        return _first(decode(ids[:size]), stops) is not None

    size = 1 + bisect_left(range(1, len(ids)), True, key=has_stop)
    found = _first(decode(ids[:size]), stops)
    assert found is not None
    return size, found


def _first(text: str, stops: Sequence[str]) -> str | None:
    places = [(place, number) for number, stop in enumerate(stops) if (place := text.find(stop)) >= 0]
    return stops[min(places)[1]] if places else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may turn out to be the beginning of a stop string.

    >>> held_back("one two\\nObs", ["\\nObservation:", "x"])
    4
    """
    most = max((len(stop) for stop in stops), default=1) - 1
    sizes = range(min(most, len(text)), 0, -1)
    return next((n for n in sizes if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)), 0)


class StopWatch:
    """Says while tokens are drawn whether one has completed a stop string, by the text of the last tokens alone.

    Args:
        stops: At least one stop string.
        decode: Called on the thread that draws.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._reach = max(map(len, stops)) + _MARGIN
        self._ids: list[int] = []

    def __call__(self, ids: Sequence[int]) -> bool:
        """Take the ids drawn since the last call, in order; whether the completion ends with the last of them."""
        before = self._ids[-self._num_before() :] if self._ids else []
        self._ids = [*self._ids[-_BYTES_OF_A_CHARACTER * self._reach :], *ids]
        return _first(self._decode(np.array([*before, *ids], dtype=np.int32)), self._stops) is not None

    def _num_before(self) -> int:
        """How many of the last ids have as much text as a stop string can have before a new one."""
        size = _FIRST_LOOK
        while size < len(self._ids):
            if len(self._decode(np.array(self._ids[-size:], dtype=np.int32))) >= self._reach:
                break
            size *= 2
        return size


def watch_for(stops: Sequence[str], decode: Decode, other: Watch | None = None) -> Watch | None:
    """Ends a completion with the token that completes a stop string, where the sampler shows its tokens; None: no one
    watches.

    Args:
        stops: The stop strings; may be none.
        decode: The text of ids.
        other: Who watches too, and is told of every token.
    """
    if not stops:
        return other
    watch = StopWatch(stops, decode)
    if other is None:
        return watch

    def both(ids: Sequence[int]) -> bool:
        is_over = other(ids)
        return watch(ids) or is_over

    return both
