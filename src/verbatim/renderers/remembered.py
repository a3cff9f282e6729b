"""Remembers what was rendered and read last, for several threads at once."""

from __future__ import annotations

import marshal
import threading
import weakref
from typing import Any, Generic, TypeVar

from verbatim.renderers.base import ParsedResponse, Schemas
from verbatim.types import Int32

K = TypeVar("K")
V = TypeVar("V")

_SCALARS = (str, int, float, bool, type(None))


MOST_BYTES = 64 * 2**20
"""Bytes of ids, texts and schemas that are kept. Without it, thousands of long completions would be kept after their
episodes."""


class Remembered(dict[K, V], Generic[K, V]):
    """The newest entries; `add` forgets the oldest ones.

    Args:
        most: Most entries.
        most_bytes: Most bytes of all of them, as `add` is told; None = they are not counted.
    """

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        super().__init__()
        self._most, self._most_bytes, self._lock = most, most_bytes, threading.Lock()
        self._sizes: dict[K, int] = {}
        self._num_bytes = 0

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


class Readings:
    """How completions were read, until the bridge behind them needs it again.

    A prompt is known by its array, which has to be read-only; the rest by its content.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._known: Remembered[tuple[int, bytes], tuple[weakref.ref[Int32], bytes, ParsedResponse]] = Remembered(
            most, most_bytes
        )

    def add(self, prompt_ids: Int32 | None, completion_ids: Int32, tools: Schemas, parsed: ParsedResponse) -> None:
        """Remember a reading, unless a part of it could still be changed."""
        if prompt_ids is None or prompt_ids.flags.writeable or not all(map(_is_flat, parsed.tool_calls)):
            return
        try:
            shown = marshal.dumps(tools, 0)  # type: ignore[arg-type]  # raises ValueError for what it cannot write
        except ValueError:
            return
        key = (id(prompt_ids), completion_ids.tobytes())
        texts = len(parsed.content) + len(parsed.reasoning_content or "") + sum(len(c.raw) for c in parsed.tool_calls)
        self._known.add(key, (weakref.ref(prompt_ids), shown, parsed), len(key[1]) + len(shown) + texts)

    def of(self, prompt_ids: Int32, completion_ids: Int32, tools: Schemas) -> ParsedResponse | None:
        """The reading of this completion behind this prompt with these schemas; None if it is not remembered."""
        found = self._known.get((id(prompt_ids), completion_ids.tobytes()))
        if found is None or found[0]() is not prompt_ids or prompt_ids.flags.writeable:
            return None
        try:
            return found[2] if marshal.dumps(tools, 0) == found[1] else None  # type: ignore[arg-type]
        except ValueError:
            return None


def _is_flat(call: Any) -> bool:
    return all(type(value) in _SCALARS for value in (call.arguments or {}).values())
