"""Defines the record of kept sets. A token's kept set contains the ids that the token was sampled from, if top-p, top-k
or min-p cut the distribution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import RecordError
from verbatim.core.records.fields import read_only
from verbatim.core.token_tree import LARGEST_ID, Int32


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSets:
    """The kept sets of N tokens, concatenated. An empty set means that the token's distribution was not cut.

    Example: of three tokens, the first was sampled from the ids 3 and 7, the second from all ids, and the third could
    only be 7: `ids = [3, 7, 7]`, `offsets = [0, 2, 2, 3]`.
    """

    ids: Int32
    """The ids of all sets, ascending within each set: int32 [K]."""
    offsets: NDArray[np.int64]
    """Set i is `ids[offsets[i]:offsets[i + 1]]`: int64 [N + 1]."""

    @classmethod
    def of(cls, sets: Iterable[Sequence[int] | Int32]) -> KeptSets:
        """Make a record from sets of ids; the ids of a set may be in any order.

        Raises:
            RecordError: an element is not a token id.
        """
        try:
            arrays = [np.asarray(each) for each in sets]
            known = [array for array in arrays if array.size]
            if not all(array.ndim == 1 and array.dtype.kind in "iu" for array in known):
                raise RecordError("kept_sets: expected a list of token ids for each completion id")
            found = np.concatenate([np.sort(array) for array in known]) if known else np.empty(0, np.int32)
        except (TypeError, ValueError) as error:
            raise RecordError(f"kept_sets: expected a list of token ids for each completion id ({error})") from None
        if found.size and not 0 <= found.min() <= found.max() <= LARGEST_ID:
            raise RecordError(f"kept_sets: ids from {found.min()} to {found.max()}; expected 0 to {LARGEST_ID}")
        return cls.of_counts(found.astype(np.int32), [array.size for array in arrays])

    @classmethod
    def of_counts(cls, ids: Int32, counts: Sequence[int] | NDArray[np.integer]) -> KeptSets:
        """Make a record from concatenated ids and the number of ids in each set."""
        offsets = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        assert offsets[-1] == len(ids), f"{len(ids)} ids for sets of {offsets[-1]}"
        return cls(ids=read_only(ids), offsets=read_only(offsets))

    @property
    def counts(self) -> NDArray[np.int64]:
        """The size of each set, 0 where nothing was cut: int64 [N]."""
        counts: NDArray[np.int64] = np.diff(self.offsets)
        return counts

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, place: int) -> Int32:
        """The set of the token at this index."""
        return self.ids[self.offsets[place] : self.offsets[place + 1]]

    def first(self, count: int) -> KeptSets:
        """The sets of the first `count` tokens."""
        offsets = self.offsets[: count + 1]
        return KeptSets(ids=self.ids[: offsets[-1]], offsets=offsets)

    def picked(self, places: NDArray[np.integer]) -> KeptSets:
        """The sets of the tokens at these indices, in this order."""
        counts = self.counts[places]
        ends = np.cumsum(counts)
        at = np.arange(counts.sum()) + np.repeat(self.offsets[:-1][places] - (ends - counts), counts)
        return KeptSets.of_counts(self.ids[at], counts)

    def spread(self, places: NDArray[np.integer], length: int) -> KeptSets:
        """A record of `length` tokens that has these sets at the given ascending indices, and empty sets at all other
        indices."""
        counts = np.zeros(length, dtype=np.int64)
        counts[places] = self.counts
        return KeptSets.of_counts(self.ids, counts)

    @staticmethod
    def joined(parts: Sequence[KeptSets | None], lengths: Sequence[int]) -> KeptSets | None:
        """The sets of several token sequences, concatenated, or None if nothing was cut in any of the sequences.

        Args:
            parts: The sets of each sequence, or None for a sequence in which nothing was cut.
            lengths: Number of tokens in each sequence.
        """
        known = [part for part in parts if part is not None]
        if not known:
            return None
        counts = [
            np.zeros(length, dtype=np.int64) if part is None else part.counts
            for part, length in zip(parts, lengths, strict=True)
        ]
        return KeptSets.of_counts(np.concatenate([part.ids for part in known]), np.concatenate(counts))


def as_kept_sets(given: KeptSets | Sequence[Sequence[int]], completion_ids: Int32) -> KeptSets:
    """Check the kept sets of a completion and return them as a record: every set that is not empty contains the sampled
    id.

    Raises:
        RecordError: the number of sets is wrong, or a set is not ascending or does not contain the sampled id.
    """
    kept = given if isinstance(given, KeptSets) else KeptSets.of(given)
    if len(kept) != len(completion_ids):
        raise RecordError(f"kept_sets: {len(kept)} for {len(completion_ids)} completion ids")
    counts = kept.counts
    owners = np.repeat(np.arange(len(kept)), counts)
    if kept.ids.size and (kept.ids.min() < 0 or (np.diff(kept.ids)[np.diff(owners) == 0] <= 0).any()):
        raise RecordError("kept_sets: expected each id of a set once, ascending and not below 0")
    found = np.bincount(owners[kept.ids == completion_ids[owners]], minlength=len(kept))
    missing = np.flatnonzero((counts > 0) & (found == 0))
    if missing.size:
        place = int(missing[0])
        raise RecordError(
            f"kept_sets: the {counts[place]} ids kept at position {place} do not include the id "
            f"{completion_ids[place]} that was sampled there"
        )
    return kept
