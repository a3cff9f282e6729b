"""Which open sample a prompt extends exactly, or where it first differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.types import Ids, Int32, common_prefix_length


class OpenSample:
    """A growing run of tokens with the spans of the turns that were sampled in it."""

    def __init__(self) -> None:
        self._buffer = np.empty(256, dtype=np.int32)
        self._length = 0
        self.spans: list[tuple[int, int, int]] = []
        """(start, end, turn index) of each completion."""

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> Int32:
        """The tokens so far: int32 [L], a view."""
        return self._buffer[: self._length]

    def append(self, ids: Ids) -> tuple[int, int]:
        """Add tokens; the span they got."""
        new = np.asarray(ids, dtype=np.int32)
        start, end = self._length, self._length + len(new)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
            grown[:start] = self.ids
            self._buffer = grown
        self._buffer[start:end] = new
        self._length = end
        return start, end


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a prompt is to the open samples."""

    sample: int | None
    """The index of the open sample whose tokens are the longest exact prefix of the prompt; None = a break."""
    shared: int
    """Ids the prompt shares with that sample (its whole length), or, at a break, with the closest one."""
    closest: int | None
    """At a break: the sample that shares most; None if there is none open."""


def find_extension(open_samples: Sequence[OpenSample], prompt_ids: Int32) -> Extension:
    """The longest open sample that is an exact prefix of the prompt.

    A shorter sample must not win over a longer one: the longer one's sampled tokens would then be taken for
    tokens that somebody else wrote.

    Example: with open samples `[1, 2]` and `[1, 2, 3]`, the prompt `[1, 2, 3, 9]` extends the second, and
    `[1, 5]` extends none: it shares 1 id with the first.
    """
    best: int | None = None
    for index, sample in enumerate(open_samples):
        length = len(sample)
        if length > len(prompt_ids) or (best is not None and length <= len(open_samples[best])):
            continue
        ids = sample.ids
        if ids[-1] == prompt_ids[length - 1] and np.array_equal(ids, prompt_ids[:length]):
            best = index
    if best is not None:
        return Extension(sample=best, shared=len(open_samples[best]), closest=best)
    closest, shared = None, 0
    for index, sample in enumerate(open_samples):
        n = common_prefix_length(sample.ids, prompt_ids)
        if closest is None or n > shared:
            closest, shared = index, n
    return Extension(sample=None, shared=shared, closest=closest)
