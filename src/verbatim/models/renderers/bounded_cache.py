"""A thread-safe cache of the newest entries, bounded in number and bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")

MOST_BYTES = 64 * 2**20
"""Maximum memory of a renderer's cached prompts, in bytes. Without this bound, thousands of long completions would stay
in memory after their episodes."""


_UNKNOWN = object()


class BoundedCache(dict[K, V], Generic[K, V]):
    """A dict of the newest entries; `add` evicts the oldest entries.

    Reads take no lock: a single dict lookup is atomic in CPython.

    Args:
        most: Maximum number of entries.
        most_bytes: Maximum total size in bytes, according to the sizes passed to `add`; None means that bytes are not
            bounded.
    """

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        super().__init__()
        self._most, self._most_bytes, self._lock = most, most_bytes, threading.Lock()
        self._sizes: dict[K, int] = {}
        self._num_bytes = 0

    def of(self, key: K, make: Callable[[K], V], num_bytes: int = 0) -> V:
        """The value of a key. If the key is missing, `make` computes the value, which is added with `num_bytes`.

        Two threads may compute the same value at the same time, because `make` runs outside the lock in order not to
        block other threads.
        """
        found: Any = self.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = make(key)
            self.add(key, found, num_bytes)
        return cast(V, found)

    def add(self, key: K, value: V, num_bytes: int = 0) -> None:
        """Add an entry of `num_bytes`, and evict the oldest entries until the bounds are met."""
        with self._lock:
            self[key] = value
            if self._most_bytes is not None:
                self._num_bytes += num_bytes - self._sizes.get(key, 0)
                self._sizes[key] = num_bytes
            while len(self) > self._most or (self._most_bytes is not None and self._num_bytes > self._most_bytes):
                oldest = next(iter(self))
                del self[oldest]
                self._num_bytes -= self._sizes.pop(oldest, 0)
