"""Bounds the bytes of request bodies in memory, for each session and in total."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from verbatim.inference.http.refused import Refused


class ByteBudget:
    """A budget of bytes. A body holds its bytes while it arrives and is parsed.

    Args:
        each: Most bytes of one owner at a time; a request beyond that is refused.
        most: Most bytes in total; a request beyond that waits.
    """

    def __init__(self, each: int, most: int) -> None:
        self._each, self._most = each, most
        self._of: Counter[object] = Counter()
        self._freed = asyncio.Condition()
        self.held = 0
        """Bytes held in total."""

    @contextlib.asynccontextmanager
    async def hold(self, owner: object, size: int, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """Hold bytes inside the block. Yields a function that holds more, for bodies of unknown length.

        Args:
            owner: The session that they count for.
            size: Bytes, as far as known in advance.
            seconds: Timeout in seconds while waiting for room.

        Raises:
            Refused: the owner holds too many bytes, or there was no room in time.
        """
        held = 0
        too_many = Refused(429, f"more than {self._each} bytes of this session's requests at a time")

        def grow(more: int) -> None:
            nonlocal held
            if self._of[owner] + more > self._each:
                raise too_many
            self._of[owner] += more
            self.held += more
            held += more

        if self._of[owner] + size > self._each:
            raise too_many
        try:
            async with asyncio.timeout(seconds), self._freed:
                # `not self._of`: with nothing else held, a body larger than the whole budget gets through too, where
                # it would otherwise wait in vain.
                await self._freed.wait_for(lambda: not self._of or self.held + size <= self._most)
                grow(size)
        except TimeoutError:
            raise Refused(503, "too many large requests at a time; try again") from None
        try:
            yield grow
        finally:
            self._of[owner] -= held
            self.held -= held
            if not self._of[owner]:
                del self._of[owner]
            async with self._freed:
                self._freed.notify_all()
