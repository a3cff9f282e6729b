"""Defines spans, which describe the trained tokens of a sample without an array entry for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.core.records.fields import Float32

OUTSIDE: dict[str, tuple[type, float]] = {
    "loss_mask": (np.bool_, False),
    "logprobs": (np.float32, np.nan),
    "advantages": (np.float32, 0.0),
    "chunk_ids": (np.int32, -1),
    "policy_versions": (np.int32, -1),
    "temperatures": (np.float32, 1.0),
}
"""For each array of a sample that is built from spans: the array's dtype, and its value outside all spans."""


class Span(NamedTuple):
    """Consecutive trained tokens of one turn and one policy version.

    Example: a turn whose first token was sampled by version 3 and whose next two by version 4 has two spans.
    """

    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""
    chunk: int
    """The turn's index."""
    version: int
    """The policy version; -1 if unknown."""
    advantage: float
    temperature: float
    logprobs: Float32 | None
    """Inference logprobs, float32 [end - start], or None if they are missing."""


_INSIDE: dict[str, Callable[[Span], Any]] = {
    "loss_mask": lambda span: True,
    "logprobs": attrgetter("logprobs"),
    "advantages": attrgetter("advantage"),
    "chunk_ids": attrgetter("chunk"),
    "policy_versions": attrgetter("version"),
    "temperatures": attrgetter("temperature"),
}
"""For each array of `OUTSIDE`, the value inside a span; None if the value inside is the same as the value outside."""


def expanded(spans: Sequence[Span], name: str, length: int) -> NDArray[Any]:
    """The array `name` (a key of `OUTSIDE`) of a sample of `length` tokens; read-only.

    >>> span = Span(start=1, end=3, chunk=0, version=7, advantage=0.5, temperature=1.0, logprobs=None)
    >>> expanded([span], "policy_versions", 4).tolist()
    [-1, 7, 7, -1]
    """
    dtype, outside = OUTSIDE[name]
    inside = _INSIDE[name]
    array: NDArray[Any] = np.empty(length, dtype=dtype)
    array.fill(outside)
    for span in spans:
        if (value := inside(span)) is not None:
            array[span[0] : span[1]] = value
    array.flags.writeable = False
    return array


def trained_places(spans: Sequence[Span]) -> NDArray[np.int64]:
    """Indices of all tokens of the spans, ascending: int64 [T].

    >>> spans = [Span(start, end, 0, 7, 0.5, 1.0, None) for start, end in ((1, 3), (6, 8))]
    >>> trained_places(spans).tolist()
    [1, 2, 6, 7]
    """
    if len(spans) == 1:
        return np.arange(spans[0].start, spans[0].end, dtype=np.int64)
    counts = _counts(spans)
    starts = np.array([span[0] for span in spans], dtype=np.int64)
    before = np.cumsum(counts) - counts
    places: NDArray[np.int64] = np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - before, counts)
    return places


def of_trained(spans: Sequence[Span], name: str) -> NDArray[Any]:
    """The values of the array `name` (a key of `OUTSIDE`) at the trained tokens: [T].

    >>> spans = [Span(1, 3, 0, 7, 0.5, 1.0, None), Span(6, 7, 1, 8, 0.5, 1.0, None)]
    >>> of_trained(spans, "policy_versions").tolist()
    [7, 7, 8]
    """
    dtype, outside = OUTSIDE[name]
    if name != "logprobs":
        values = [_INSIDE[name](span) for span in spans]
        if len(spans) == 1:
            return np.full(spans[0].end - spans[0].start, values[0], dtype)
        return np.repeat(np.array(values, dtype=dtype), _counts(spans))
    pieces = [
        np.full(span.end - span.start, outside, dtype) if span.logprobs is None else span.logprobs for span in spans
    ]
    return np.concatenate(pieces or [np.empty(0, dtype=dtype)])


def _counts(spans: Sequence[Span]) -> NDArray[np.int64]:
    return np.array([span[1] - span[0] for span in spans], dtype=np.int64)
