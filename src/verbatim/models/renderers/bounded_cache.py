"""Remembers what was rendered last, for several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")

MOST_BYTES = 64 * 2**20
"""Bytes of ids, texts and schemas that are kept. Without it, thousands of long completions would be kept after their
episodes."""


_UNKNOWN = object()


class BoundedCache(dict[K, V], Generic[K, V]):
    """The newest entries; `add` forgets the oldest ones.

    Args:
        most: Most entries.
        most_bytes: Most bytes of all of them, as `add` is told; None: they are not counted.
    """

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        super().__init__()
        self._most, self._most_bytes, self._lock = most, most_bytes, threading.Lock()
        self._sizes: dict[K, int] = {}
        self._num_bytes = 0

    def of(self, key: K, make: Callable[[K], V], num_bytes: int = 0) -> V:
        """The value of a key; made, and remembered with so many bytes, where it is not known."""
        found: Any = self.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = make(key)
            self.add(key, found, num_bytes)
        return cast(V, found)

    def add(self, key: K, value: V, num_bytes: int = 0) -> None:
        """Remember one more, of so many bytes."""
        with self._lock:
            self[key] = value
            if self._most_bytes is not None:
                self._num_bytes += num_bytes - self._sizes.get(key, 0)
                self._sizes[key] = num_bytes
            while len(self) > self._most or (self._most_bytes is not None and self._num_bytes > self._most_bytes):
                oldest = next(iter(self))
                del self[oldest]
                self._num_bytes -= self._sizes.pop(oldest, 0)
