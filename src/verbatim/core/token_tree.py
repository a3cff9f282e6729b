"""Stores the token sequences of one trajectory; each distinct (prefix, token) is stored and compared only once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import RecordError

Int32: TypeAlias = NDArray[np.int32]
Ids: TypeAlias = Int32 | Sequence[int]

LARGEST_ID = int(np.iinfo(np.int32).max)
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_FEW = 4096
"""Arrays of up to this many ids are compared as bytes, which is faster; longer arrays are compared as numbers, to save
memory."""


class Segment:
    """Consecutive ids: the part of a sequence that was new when the sequence was added. It follows the parent
    segment."""

    __slots__ = ("end", "ids", "parent", "start")

    def __init__(self, ids: Int32, parent: Segment | None, start: int) -> None:
        self.ids = ids
        """int32 [end - start], read-only."""
        self.parent = parent
        """The segment with the preceding token, or None at the root."""
        self.start = start
        """Number of tokens before this segment."""
        self.end = start + len(ids)
        """Number of tokens up to the end of this segment."""


class TokenPath:
    """A token sequence, given by the position in a `TokenTree` at which it ends.

    In one tree, equal sequences end in the same segment at the same length, so prefixes are found by identity.
    """

    __slots__ = ("added", "length", "segment", "tree")

    def __init__(self, tree: object, segment: Segment | None, length: int, added: Int32 | None = None) -> None:
        self.tree = tree
        """An object that identifies the tree. It is not the tree itself, so that a path does not keep the tree
        alive."""
        self.segment = segment
        """The segment with the last token, or None for the empty sequence."""
        self.length = length
        """Number of tokens."""
        self.added = added
        """The completion with which the path was created; the sequence ends with it."""

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"TokenPath({self.ids()!r})"

    def __deepcopy__(self, memo: object) -> TokenPath:
        """Returns self, because a path is immutable. Copying its linked segments would exceed the recursion limit."""
        return self

    def ids(self, length: int | None = None, *, start: int = 0) -> Int32:
        """The tokens from `start` to `length` (by default all) as one read-only int32 array."""
        end = self.length if length is None else length
        segment = self.segment if end == self.length else self.segment_at(end)
        parts: list[Int32] = []
        while segment is not None and start < end:
            ids, first = segment.ids, segment.start
            parts.append(ids if end == segment.end and start <= first else ids[max(0, start - first) : end - first])
            end, segment = first, segment.parent
        return _joined(parts)

    def segment_at(self, length: int) -> Segment | None:
        """The segment with token `length - 1` of this sequence, or None for length 0."""
        segment = self.segment
        while segment is not None and segment.start >= length:
            segment = segment.parent
        return segment

    def starts_with(self, other: TokenPath) -> bool:
        """True if the other sequence, of the same tree, is a prefix of this sequence or equal to it."""
        return other.length <= self.length and self.segment_at(other.length) is other.segment

    def ends_with(self, ids: Int32) -> bool:
        """True if the sequence ends with these ids."""
        if ids is self.added:
            return True
        count = len(ids)
        if not count or self.segment is None or count > self.length:
            return not count
        end = self.length - self.segment.start
        stored = self.segment.ids[end - count : end] if count <= end else self.ids()[-count:]
        return stored.tobytes() == ids.tobytes()

    def shared_with(self, other: TokenPath) -> int:
        """The number of leading tokens that two sequences of the same tree share."""
        depths = dict(self._walk())
        return next((min(depth, depths[segment]) for segment, depth in other._walk() if segment in depths), 0)

    def _walk(self) -> Iterator[tuple[Segment, int]]:
        """The segments from the end to the root, each with the number of this sequence's tokens up to and including the
        segment."""
        segment, length = self.segment, self.length
        while segment is not None:
            yield segment, length
            length, segment = segment.start, segment.parent


class PathReader:
    """Reads sequences of one tree as arrays. If a prefix was read before, it is copied from the earlier array in one
    step.

    Reading each sequence on its own would join all its segments every time, and a conversation with a break at every
    turn has as many segments as turns.
    """

    def __init__(self) -> None:
        self._read: dict[Segment, tuple[int, Int32]] = {}
        """For each segment, the length of a prefix that ends in the segment, and an array that begins with this
        prefix."""

    def ids(self, path: TokenPath) -> Int32:
        """The tokens of a sequence as a read-only int32 array."""
        place, end = path.segment, path.length
        parts: list[Int32] = []
        new: list[tuple[Segment, int]] = []
        while place is not None:
            known = self._read.get(place)
            if known is not None and end <= known[0]:
                parts.append(known[1][:end])
                break
            new.append((place, end))
            parts.append(place.ids if end == place.end else place.ids[: end - place.start])
            end, place = place.start, place.parent
        out = _joined(parts)
        for segment, length in new:
            self._read[segment] = (length, out)
        return out


class TokenTree:
    """A tree to which prompts are added with their completions: the tree stores the new part of each sequence, and
    compares the rest with the parts that are stored already.

    A prompt that extends the last added sequence (the common case) costs one memory comparison. Any other prompt is
    compared with the last added sequence up to the first difference, and from there with the stored branch that has the
    same ids: one comparison per token, for any number of branches.

    Example: after `add([1, 2], [3])` and `add([1, 2, 3, 4], [5])` the tree holds the segments `[1, 2, 3]` and `[4, 5]`;
    after `add([1, 2, 9], [6])` it also holds `[9, 6]`, which follows the first two tokens of the first segment.

    Args:
        vocab_size: Ids must be below this.
    """

    def __init__(self, vocab_size: int = LARGEST_ID + 1) -> None:
        self._vocab_size = vocab_size
        self._key = object()
        self._branches: dict[tuple[Segment | None, int, int], Segment] = {}
        """Segments by (the segment they follow, the length at which they branch off, their first id)."""
        self._last: Int32 | bytes = b""
        """The beginning of the last added sequence: the prompt array itself if it can be kept, otherwise its bytes."""
        self._tail = _NONE
        """The end of the last added sequence; `_last` has everything before it."""
        self._last_is_new = False
        """True if part of the last added sequence was newly stored; the new segment then ends where the sequence ends
        and has no branches yet."""
        self._last_path = self.root

    @property
    def root(self) -> TokenPath:
        """The empty sequence."""
        return TokenPath(self._key, None, 0)

    def add(self, prompt: Int32, completion: Int32) -> tuple[TokenPath, Int32]:
        """Add a prompt and its completion.

        Args:
            prompt: int32 [P]; kept without a copy only if the array owns its memory and is read-only.
            completion: int32 [C]; copied.

        Returns:
            (1) The path of the whole sequence and (2) the stored completion.

        Raises:
            RecordError: an id is outside the vocabulary; the message names its position. Nothing is added.
        """
        num_prompt = len(prompt)
        total = num_prompt + len(completion)
        raw = None if _is_kept(prompt) else prompt.tobytes()
        segment, known = self._find(prompt, raw)
        if known == num_prompt:
            # The whole prompt is known, so the completion may be known as well.
            segment, known = self._descend(segment, known, completion, num_prompt)
        stored: Int32 | None = None
        if known < total:
            is_new = known <= num_prompt  # all of the completion
            if is_new:
                asked = prompt[known:].tobytes() if raw is None else raw[known * _INT32.itemsize :]
                ids: Int32 = np.frombuffer(asked + completion.tobytes(), _INT32)
                stored = ids[num_prompt - known :]
            else:
                ids = np.frombuffer(completion[known - num_prompt :].tobytes(), _INT32)
            # As unsigned numbers negative ids are the largest, so one test covers both bounds; `argmax` takes a third
            # of the time of `max`.
            if not 0 <= ids.item(ids.view(_UINT32).argmax()) < self._vocab_size:
                self._refuse(ids, known, num_prompt)
            parent, segment = segment, Segment(ids, segment, known)
            self._branches[parent, known, ids.item(0)] = segment
        if stored is None:
            stored = _read_only(completion.copy())
        self._last_path = TokenPath(self._key, segment, total, stored)
        self._last = prompt if raw is None else raw
        self._tail, self._last_is_new = stored, known < total
        return self._last_path, stored

    def foresee(self, prompt: Int32) -> None:
        """If a prompt that will be added later extends the last added sequence, compare the two now: `add` need not
        compare them again, and the memory held for the comparison is freed."""
        if _is_kept(prompt) and self._extends_last(prompt):
            self._last, self._tail = prompt, _NONE

    def _extends_last(self, ids: Int32) -> bool:
        last, tail, length = self._last, self._tail, self._last_path.length
        if len(ids) < length:
            return False
        head = length - len(tail)
        return (ids is last or _same(ids[:head], np.frombuffer(last, _INT32)[:head])) and _same(ids[head:length], tail)

    def _find(self, ids: Int32, raw: bytes | None) -> tuple[Segment | None, int]:
        """The segment and length at which the known part of a sequence ends.

        Args:
            ids: The sequence.
            raw: The sequence as bytes, because bytes are compared faster than arrays; None if the array is kept.
        """
        last, tail, length = self._last, self._tail, self._last_path.length
        if raw is not None and isinstance(last, bytes):
            starts = raw.startswith(last)
            extends = starts and raw.startswith(tail, len(last))  # type: ignore[arg-type]  # an array is a buffer
        else:
            starts, extends = False, self._extends_last(ids)
        if extends:
            segment, known = self._last_path.segment, length
            if self._last_is_new:
                return segment, known
        else:
            head = length - len(tail)
            known = head if starts else common_prefix_length(np.frombuffer(last, _INT32)[:head], ids)
            if known == head:  # the prompt may repeat part of the completion, e.g. if it omits the thinking
                known += common_prefix_length(tail, ids[head:])
            segment = self._last_path.segment_at(known)
        return self._descend(segment, known, ids, 0)

    def _descend(self, segment: Segment | None, known: int, ids: Int32, start: int) -> tuple[Segment | None, int]:
        """Continue from a position in the tree as long as the stored ids match `ids`, whose first id is at position
        `start`."""
        total = start + len(ids)
        while known < total:
            first = ids.item(known - start)
            if segment is None or known == segment.end or segment.ids.item(known - segment.start) != first:
                branch = self._branches.get((segment, known, first))
                if branch is None:
                    break
                segment = branch
            known += common_prefix_length(segment.ids[known - segment.start :], ids[known - start :])
        return segment, known

    def _refuse(self, ids: Int32, start: int, num_prompt: int) -> NoReturn:
        at = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
        place = start + at
        what, position = ("prompt", place) if place < num_prompt else ("completion", place - num_prompt)
        raise RecordError(
            f"{what}_ids: id {int(ids[at])} at position {position} is "
            + ("not a token id" if self._vocab_size > LARGEST_ID else f"outside the vocabulary of {self._vocab_size}")
        )


_NONE: Int32 = np.frombuffer(b"", _INT32)


def _same(a: Int32, b: Int32) -> bool:
    """True if two arrays of the same length hold the same ids."""
    return a.tobytes() == b.tobytes() if len(a) <= _FEW else bool(np.logical_and.reduce(a == b))


def _joined(parts: list[Int32]) -> Int32:
    """Join the parts of a sequence, given from the last to the first, as one read-only array."""
    if not parts:
        return _NONE
    if len(parts) == 1:
        return parts[0]
    parts.reverse()
    return _read_only(np.concatenate(parts))


def _read_only(ids: Int32) -> Int32:
    ids.flags.writeable = False
    return ids


def _is_kept(ids: Int32) -> bool:
    """True if the array need not be copied, because it owns its memory and is read-only."""
    flags = ids.flags
    return not flags.writeable and flags.owndata and flags.c_contiguous


def common_prefix_length(a: Int32, b: Int32) -> int:
    """The number of leading ids that two sequences share.

    >>> common_prefix_length(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    n = min(len(a), len(b))
    if not n or a.item(0) != b.item(0):
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs.item(first) else n


def as_ids(values: Any, what: str) -> Int32:
    """Token ids as an int32 array; an int32 array is returned unchanged.

    Raises:
        RecordError: the values are not a flat list of integers that fit into 32 bits; the message names the position.
    """
    if isinstance(values, np.ndarray) and values.dtype == _INT32 and values.ndim == 1:
        return values
    if isinstance(values, list) and (ids := of_list(values)) is not None:
        return ids
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{what}: expected one list of token ids ({error})") from None
    if found.ndim != 1:
        raise RecordError(f"{what}: expected one list of token ids, found an array of shape {found.shape}")
    if found.size == 0:
        return np.empty(0, dtype=np.int32)
    if found.dtype.kind not in "iu":
        raise RecordError(f"{what}: token ids are integers, found {found.dtype}")
    if found.min() < 0 or found.max() > LARGEST_ID:
        at = int(np.flatnonzero((found < 0) | (found > LARGEST_ID))[0])
        raise RecordError(f"{what}: id {int(found[at])} at position {at} is not a token id")
    return found.astype(np.int32)


def of_list(values: list[Any]) -> Int32 | None:
    """A list of integers as an int32 array, or None if not all of them are 32-bit integers."""
    for kind in "Ii":  # "I" (unsigned) takes half the time, but refuses negative numbers
        try:
            found: Int32 = np.frombuffer(array(kind, values), _INT32)
        except (TypeError, OverflowError):
            continue
        if kind == "i" or not len(found) or found.item(found.argmin()) >= 0:
            return found
    return None
