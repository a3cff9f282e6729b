"""Finds stop strings in sampled ids. A completion ends with the token that completes a stop string.

Tokens are never cut: the token that completes a stop string is part of the completion, with its logprob, even if its
text continues after the stop string. The response's text ends before the stop string.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from verbatim.core.types import Int32
from verbatim.inference.sampler import Watch

Decode = Callable[[Int32], str]
"""Decodes ids to text. A prefix of the ids must decode to a prefix of the text, except that the decoded prefix may end
with U+FFFD."""
_BYTES_OF_A_CHARACTER = 4
_MARGIN = 8
"""Number of characters at the start of a decoded window that may be wrong, because the window may begin inside a
character."""
_FIRST_WINDOW = 16
"""Number of ids whose text is usually longer than any stop string; it is doubled until the text is long enough."""


def find_stop(ids: Int32, stops: Sequence[str], decode: Decode) -> tuple[int, str] | None:
    """Find the first stop string in the text of a completion.

    Returns:
        (the number of ids up to and including the id that completes a stop string, the stop string), or None if the
        text has no stop string. If that id completes several stop strings, the stop string that begins first is
        returned.

    Example: the ids of "ab", "c;", "d" with the stops [";", "d"] give (2, ";").
    """
    if not stops or not len(ids) or _first(decode(ids), stops) is None:
        return None

    def has_stop(size: int) -> bool:
        return _first(decode(ids[:size]), stops) is not None

    # If a prefix has a stop string, every longer prefix has one too, so bisection finds the shortest such prefix.
    size = 1 + bisect_left(range(1, len(ids)), True, key=has_stop)
    found = _first(decode(ids[:size]), stops)
    assert found is not None
    return size, found


def _first(text: str, stops: Sequence[str]) -> str | None:
    places = [(place, number) for number, stop in enumerate(stops) if (place := text.find(stop)) >= 0]
    return stops[min(places)[1]] if places else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the beginning of a stop string.

    >>> held_back("one two\\nObs", ["\\nObservation:", "x"])
    4
    """
    most = max((len(stop) for stop in stops), default=1) - 1
    sizes = range(min(most, len(text)), 0, -1)
    return next((n for n in sizes if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)), 0)


class StopWatch:
    """A `Watch` that ends a completion at the first stop string. It decodes only the last tokens, so that the cost per
    token does not grow with the completion.

    Args:
        stops: At least one stop string.
        decode: Decodes ids; called on the thread that samples.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._reach = max(map(len, stops)) + _MARGIN
        self._ids: list[int] = []

    def __call__(self, ids: Sequence[int]) -> bool:
        """Add the ids sampled since the last call, in order. Returns True if they complete a stop string."""
        before = self._ids[-self._num_before() :] if self._ids else []
        # An id is at least one byte and a character at most four, so this many ids hold at least `_reach` characters.
        self._ids = [*self._ids[-_BYTES_OF_A_CHARACTER * self._reach :], *ids]
        return _first(self._decode(np.array([*before, *ids], dtype=np.int32)), self._stops) is not None

    def _num_before(self) -> int:
        """Number of earlier ids to decode together with the new ids, because a stop string may have begun in them."""
        size = _FIRST_WINDOW
        while size < len(self._ids):
            if len(self._decode(np.array(self._ids[-size:], dtype=np.int32))) >= self._reach:
                break
            size *= 2
        return size


def watch_for(stops: Sequence[str], decode: Decode, other: Watch | None = None) -> Watch | None:
    """A `Watch` that ends a completion at a stop string and also calls `other`; None if there is nothing to watch.

    Args:
        stops: The stop strings; may be empty.
        decode: Decodes ids.
        other: A further callback for all tokens. The completion also ends if this callback returns True.
    """
    if not stops:
        return other
    watch = StopWatch(stops, decode)
    if other is None:
        return watch

    def both(ids: Sequence[int]) -> bool:
        is_over = other(ids)
        return watch(ids) or is_over  # always call both, because each keeps its own state

    return both
