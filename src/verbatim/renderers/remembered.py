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


class Remembered(dict[K, V], Generic[K, V]):
    """The newest entries; `add` forgets the oldest ones."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def add(self, key: K, value: V) -> None:
        """Remember one more."""
        with self._lock:
            self[key] = value
            while len(self) > self._most:
                del self[next(iter(self))]


class Readings:
    """How completions were read, until the bridge behind them needs it again.

    A prompt is known by its array, which has to be read-only; the rest by its content.
    """

    def __init__(self, most: int) -> None:
        self._known: Remembered[tuple[int, bytes], tuple[weakref.ref[Int32], bytes, ParsedResponse]] = Remembered(most)

    def add(self, prompt_ids: Int32 | None, completion_ids: Int32, tools: Schemas, parsed: ParsedResponse) -> None:
        """Remember a reading, unless somebody could change a part of it."""
        if prompt_ids is None or prompt_ids.flags.writeable or not all(map(_is_flat, parsed.tool_calls)):
            return
        try:
            shown = marshal.dumps(tools, 0)  # type: ignore[arg-type]  # raises ValueError for what it cannot write
        except ValueError:
            return
        self._known.add((id(prompt_ids), completion_ids.tobytes()), (weakref.ref(prompt_ids), shown, parsed))

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
