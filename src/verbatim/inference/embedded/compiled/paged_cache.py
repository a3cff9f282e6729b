"""Stores keys and values in pages of a few tokens, which sequences with equal first tokens share.

A full page never changes, so any number of slots may name it. A page that a sequence still fills belongs to that slot
alone: it is copied where another sequence goes on from the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from verbatim.inference.embedded.compiled.structures import PassFields
from verbatim.inference.embedded.kv_cache import KeyValueShape, up_to
from verbatim.inference.embedded.slots import Slots

PAGE = 16
"""Tokens of a page; the same in kernel.c."""
_CHUNK_BYTES = 8 << 20
"""Memory is taken in chunks of about this many bytes."""


class PagedCache:
    """Pages of keys and values, and the pages of each slot.

    Args:
        shape: Of one token's keys and values; key and value size are equal.
        num_slots: Slots whose pages are kept.
        context_length: Most tokens of a slot.
    """

    def __init__(self, shape: KeyValueShape, num_slots: int, context_length: int) -> None:
        self.shape = shape
        self.planes = shape.num_layers * shape.num_kv_heads * 2
        self._page_floats = PAGE * shape.key_size
        page_bytes = self.planes * self._page_floats * 4
        self.chunk_bits = max(4, min((_CHUNK_BYTES // page_bytes).bit_length() - 1, 10))
        self.chunk_pages = 1 << self.chunk_bits
        """Pages of one chunk of memory."""
        self.tables = np.zeros((num_slots, up_to(context_length, PAGE) // PAGE), dtype=np.int32)
        """The numbers of each slot's pages: int32 [slots, most pages]."""
        self.num_pages = np.zeros(num_slots, dtype=np.int64)
        """Pages of each slot: int64 [slots]."""
        self._chunks: list[torch.Tensor | None] = []
        self.addresses = np.zeros(0, dtype=np.int64)
        """Where each chunk begins; 0 for one that was given back."""
        self._users = np.zeros(0, dtype=np.int32)
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that each slot can hold."""
        return self.tables.shape[1] * PAGE

    @property
    def used(self) -> int:
        """Pages in use."""
        return int((self._users > 0).sum())

    def fill(self, fields: PassFields) -> None:
        """Enter where the pages are."""
        fields.tables, fields.table_width = self.tables.ctypes.data, self.tables.shape[1]
        fields.chunks, fields.chunk_bits = self.addresses.ctypes.data, self.chunk_bits

    # ---- memory

    def reserve(self, num_tokens: int) -> None:
        """Have free pages for a sequence of so many tokens."""
        while len(self._free) * PAGE < num_tokens:
            self._grow()

    def _grow(self) -> None:
        # Zeros and not `empty`: memory that was never written could hold no numbers, and 0 * NaN is NaN.
        chunk = torch.zeros(self.planes, self.chunk_pages, self._page_floats)
        index = self._chunks.index(None) if None in self._chunks else len(self._chunks)
        if index == len(self._chunks):
            self._chunks.append(None)
            self.addresses = np.append(self.addresses, np.int64(0))
            self._users = np.append(self._users, np.zeros(self.chunk_pages, dtype=np.int32))
        self._chunks[index] = chunk
        self.addresses[index] = chunk.data_ptr()
        first = index * self.chunk_pages
        self._free[:0] = range(first + self.chunk_pages - 1, first - 1, -1)  # neighbours are taken in order

    def shrink(self, num_tokens: int) -> None:
        """Give back the chunks without a page in use."""
        used = self._users.reshape(-1, self.chunk_pages).sum(axis=1).tolist()
        self._chunks = [chunk if users else None for chunk, users in zip(self._chunks, used, strict=True)]
        self.addresses[[index for index, users in enumerate(used) if not users]] = 0
        self._free = [page for page in self._free if used[page // self.chunk_pages]]

    def drop(self) -> None:
        """Give back all memory; every slot is empty."""
        self.clear()
        self.shrink(0)

    def clear(self, slots: int | slice = slice(None)) -> None:
        """Empty some slots."""
        if isinstance(slots, slice):
            for slot in range(len(self.num_pages))[slots]:
                self.truncate(slot, 0)
            if not self._users.any():  # neighbours in memory are taken together again
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
        """A page of its own with the same keys and values."""
        own = self._take()
        (source, at), (target, to) = divmod(page, self.chunk_pages), divmod(own, self.chunk_pages)
        source_chunk, target_chunk = self._chunks[source], self._chunks[target]
        assert source_chunk is not None and target_chunk is not None, "a page in use lies in memory"
        target_chunk[:, to] = source_chunk[:, at]
        return own

    # ---- slots

    def extend(self, slots: Slots, num_tokens: NDArray[np.int64]) -> None:
        """Give slots pages for sequences of so many tokens."""
        needed = (num_tokens + PAGE - 1) // PAGE
        short = needed > self.num_pages[slots]
        for slot, most in zip(slots[short].tolist(), needed[short].tolist(), strict=True):
            for index in range(int(self.num_pages[slot]), most):
                self.tables[slot, index] = self._take()
                self.num_pages[slot] = index + 1

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Keep a slot's first tokens only; the page to be filled next is its own."""
        self._set(slot, self.tables[slot, : self.num_pages[slot]].tolist(), num_tokens)

    def copy_prefix(self, source: int, slot: int, num_tokens: int) -> None:
        """A slot begins with the first tokens of another."""
        self._set(slot, self.tables[source, : self.num_pages[source]].tolist(), num_tokens)

    def keep(self, slot: int, num_tokens: int) -> list[int]:
        """Hold a slot's first tokens while another sequence takes the slot, until `release`; the pages."""
        pages: list[int] = self.tables[slot, : -(-num_tokens // PAGE)].tolist()
        self._users[pages] += 1
        return pages

    def restore(self, kept: list[int], slot: int, num_tokens: int) -> None:
        """A slot begins with the first tokens of a kept sequence."""
        self._set(slot, kept, num_tokens)

    def release(self, kept: list[int]) -> None:
        """Give up what was kept."""
        self._give_up(kept)

    def _set(self, slot: int, pages: list[int], num_tokens: int) -> None:
        """Let a slot have the first tokens of these pages, instead of what it has."""
        before = self.tables[slot, : self.num_pages[slot]].tolist()
        full, rest = divmod(num_tokens, PAGE)
        taken = pages[: full + bool(rest)]
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
