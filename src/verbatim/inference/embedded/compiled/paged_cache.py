"""Stores keys and values in pages of a few tokens; sequences with a common prefix share pages.

A full page never changes, so any number of slots may refer to it. A page that a sequence is still filling belongs only
to that sequence's slot; it is copied if another sequence continues from the same tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from verbatim.inference.embedded.compiled.structures import PassFields, zeros_in_large_pages
from verbatim.inference.embedded.kv_cache import KeyValueShape, up_to
from verbatim.inference.embedded.slots import Slots

PAGE = 16
"""Number of tokens per page. kernel.c has the same number."""
_CHUNK_BYTES = 8 << 20
"""Memory is allocated in chunks of about this many bytes."""


class PagedCache:
    """Reference-counted pages of keys and values, and the list of pages of each slot.

    Args:
        shape: Shape of one token's keys and values; keys and values must have the same size.
        num_slots: Number of slots.
        context_length: Maximum tokens of a slot.
        dtype: Number format of keys and values.
    """

    def __init__(
        self, shape: KeyValueShape, num_slots: int, context_length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.planes = shape.num_layers * shape.num_kv_heads * 2
        self._page_size = PAGE * shape.key_size
        page_bytes = self.planes * self._page_size * dtype.itemsize
        # A power of two, because the kernel splits a page's number into chunk and index by bit shifts.
        self.chunk_bits = max(4, min((_CHUNK_BYTES // page_bytes).bit_length() - 1, 10))
        self.chunk_pages = 1 << self.chunk_bits
        """Number of pages in a chunk of memory."""
        self.tables = np.zeros((num_slots, up_to(context_length, PAGE) // PAGE), dtype=np.int32)
        """Page numbers of each slot: int32 [slots, maximum pages]."""
        self.num_pages = np.zeros(num_slots, dtype=np.int64)
        """Number of pages of each slot: int64 [slots]."""
        self._chunks: list[torch.Tensor | None] = []
        self.addresses = np.zeros(0, dtype=np.int64)
        """Address of each chunk; 0 for a chunk that was freed."""
        self._users = np.zeros(0, dtype=np.int32)
        """Reference count of each page."""
        self._free: list[int] = []
        """Free pages; the last one is taken next."""

    @property
    def capacity(self) -> int:
        """Number of tokens that each slot can hold."""
        return self.tables.shape[1] * PAGE

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return int((self._users > 0).sum())

    def fill(self, fields: PassFields) -> None:
        """Fill in the addresses of the page tables and chunks."""
        fields.tables, fields.table_width = self.tables.ctypes.data, self.tables.shape[1]
        fields.chunks, fields.chunk_bits = self.addresses.ctypes.data, self.chunk_bits

    # ---- memory

    def reserve(self, num_tokens: int) -> None:
        """Make sure that there are free pages for a sequence of this many tokens."""
        while len(self._free) * PAGE < num_tokens:
            self._grow()

    def _grow(self) -> None:
        # Use zeros instead of `empty`, because memory that was never written may hold NaN, and 0 * NaN is NaN.
        sizes = (self.planes, self.chunk_pages, self._page_size)
        chunk = zeros_in_large_pages(math.prod(sizes), self.dtype).view(sizes)
        index = self._chunks.index(None) if None in self._chunks else len(self._chunks)
        if index == len(self._chunks):
            self._chunks.append(None)
            self.addresses = np.append(self.addresses, np.int64(0))
            self._users = np.append(self._users, np.zeros(self.chunk_pages, dtype=np.int32))
        self._chunks[index] = chunk
        self.addresses[index] = chunk.data_ptr()
        first = index * self.chunk_pages
        self._free[:0] = range(first + self.chunk_pages - 1, first - 1, -1)  # adjacent pages are taken in order

    def shrink(self, num_tokens: int) -> None:
        """Free the chunks that have no page in use."""
        used = self._users.reshape(-1, self.chunk_pages).sum(axis=1).tolist()
        self._chunks = [chunk if users else None for chunk, users in zip(self._chunks, used, strict=True)]
        self.addresses[[index for index, users in enumerate(used) if not users]] = 0
        self._free = [page for page in self._free if used[page // self.chunk_pages]]

    def drop(self) -> None:
        """Empty every slot, and free all memory."""
        self.clear()
        self.shrink(0)

    def clear(self, slots: int | slice = slice(None)) -> None:
        """Empty some slots."""
        if isinstance(slots, slice):
            for slot in range(len(self.num_pages))[slots]:
                self.truncate(slot, 0)
            if not self._users.any():  # so that sequences get adjacent pages again
                self._free.sort(reverse=True)
        else:
            self.truncate(slots, 0)

    def _take(self) -> int:
        if not self._free:
            self._grow()
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _give_up(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def _copy(self, page: int) -> int:
        """Copy a page; returns the copy's number."""
        own = self._take()
        (source, at), (target, to) = divmod(page, self.chunk_pages), divmod(own, self.chunk_pages)
        source_chunk, target_chunk = self._chunks[source], self._chunks[target]
        assert source_chunk is not None and target_chunk is not None, "a page in use lies in memory"
        target_chunk[:, to] = source_chunk[:, at]
        return own

    # ---- slots

    def extend(self, slots: Slots, num_tokens: NDArray[np.int64]) -> None:
        """Give slots enough pages for sequences of these lengths."""
        needed = (num_tokens + PAGE - 1) // PAGE
        short = needed > self.num_pages[slots]
        for slot, most in zip(slots[short].tolist(), needed[short].tolist(), strict=True):
            for index in range(int(self.num_pages[slot]), most):
                self.tables[slot, index] = self._take()
                self.num_pages[slot] = index + 1

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Keep only a slot's first tokens. A page that is partly filled then belongs to the slot alone."""
        self._set(slot, self.tables[slot, : self.num_pages[slot]].tolist(), num_tokens)

    def copy_prefix(self, source: int, slot: int, num_tokens: int) -> None:
        """Let a slot begin with a prefix of another slot."""
        self._set(slot, self.tables[source, : self.num_pages[source]].tolist(), num_tokens)

    def keep(self, slot: int, num_tokens: int) -> list[int]:
        """Keep the pages of a slot's prefix in use until `release`, although another sequence takes the slot."""
        pages: list[int] = self.tables[slot, : -(-num_tokens // PAGE)].tolist()
        self._users[pages] += 1
        return pages

    def restore(self, kept: list[int], slot: int, num_tokens: int) -> None:
        """Let a slot begin with a prefix of a kept sequence."""
        self._set(slot, kept, num_tokens)

    def release(self, kept: list[int]) -> None:
        """Release pages that `keep` has kept in use."""
        self._give_up(kept)

    def _set(self, slot: int, pages: list[int], num_tokens: int) -> None:
        """Replace a slot's pages with the part of `pages` that holds the first `num_tokens` tokens."""
        before = self.tables[slot, : self.num_pages[slot]].tolist()
        full, rest = divmod(num_tokens, PAGE)
        taken = pages[: full + bool(rest)]
        # Count the new references before the old pages are released, because both may contain the same pages.
        self._users[taken] += 1
        self._give_up(before)
        self.num_pages[slot] = 0
        if rest and self._users[taken[-1]] > 1:
            shared = taken[-1]
            try:
                taken[-1] = self._copy(shared)
            except BaseException:
                self._give_up(taken)
                raise
            self._give_up([shared])
        self.tables[slot, : len(taken)] = taken
        self.num_pages[slot] = len(taken)
