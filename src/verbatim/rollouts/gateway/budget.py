"""Bounds the bytes of request bodies in memory, of each session and of all together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from verbatim.inference.http.refused import Refused


class ByteBudget:
    """Bodies take their bytes while they arrive and are parsed.

    Args:
        each: Most bytes of one owner at a time; more is refused.
        most: Most bytes of all at a time; more waits.
    """

    def __init__(self, each: int, most: int) -> None:
        self._each, self._most = each, most
        self._of: Counter[object] = Counter()
        self._freed = asyncio.Condition()
        self.held = 0
        """Bytes of all."""

    @contextlib.asynccontextmanager
    async def hold(self, owner: object, size: int, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """Hold bytes inside of the block, which gets a function that holds more of them.

        Args:
            owner: Whose they are.
            size: As far as it is known.
            seconds: To wait for room.

        Raises:
            Refused: the owner has too many, or there is no room in time.
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
