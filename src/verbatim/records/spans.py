"""Defines how a training sample says what it knows of its trained tokens without an array for each: by spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.records.fields import Float32

OUTSIDE: dict[str, tuple[type, float]] = {
    "loss_mask": (np.bool_, False), "logprobs": (np.float32, np.nan), "advantages": (np.float32, 0.0),
    "chunk_ids": (np.int32, -1), "policy_versions": (np.int32, -1), "temperatures": (np.float32, 1.0),
}  # fmt: skip
"""The arrays of a sample that follow from its spans: their types, and what they hold outside of all spans."""


class Span(NamedTuple):
    """Trained tokens, one after the other, that are of one turn and of one policy version.

    Example: a turn of which the first token was sampled by version 3 and two more by version 4 is two spans.
    """

    start: int
    """The first of them."""
    end: int
    """The first token after them."""
    chunk: int
    """The turn's index."""
    version: int
    """-1 = unknown."""
    advantage: float
    temperature: float
    logprobs: Float32 | None
    """float32 [end - start]; None = missing."""


_INSIDE: dict[str, Callable[[Span], Any]] = {
    "loss_mask": lambda span: True, "logprobs": attrgetter("logprobs"), "advantages": attrgetter("advantage"),
    "chunk_ids": attrgetter("chunk"), "policy_versions": attrgetter("version"),
    "temperatures": attrgetter("temperature"),
}  # fmt: skip
"""What the arrays of `OUTSIDE` hold in a span; None = what they hold outside."""


def expanded(spans: Sequence[Span], name: str, length: int) -> NDArray[Any]:
    """One of the arrays of `OUTSIDE`, for a sample of so many tokens; read-only.

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
    """The places of all their tokens, ascending: int64 [T]."""
    return _joined([np.arange(span.start, span.end, dtype=np.int64) for span in spans], np.int64)


def of_trained(spans: Sequence[Span], name: str) -> NDArray[Any]:
    """One of the arrays of `OUTSIDE` at the trained tokens alone: [T]."""
    dtype, outside = OUTSIDE[name]
    pieces = []
    for span in spans:
        value = _INSIDE[name](span)
        if not isinstance(value, np.ndarray):
            value = np.full(span.end - span.start, outside if value is None else value, dtype=dtype)
        pieces.append(value)
    return _joined(pieces, dtype)


def _joined(pieces: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
