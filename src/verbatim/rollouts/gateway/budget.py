"""Limits the number of bytes of request bodies in memory, per session and in total."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from verbatim.inference.http.refused import Refused


class ByteBudget:
    """A budget of bytes. A request body holds its bytes while it is received and parsed.

    Args:
        each: Maximum number of bytes that one owner may hold at a time. A request that exceeds it is refused.
        most: Maximum number of bytes that all owners together may hold. A request that exceeds it waits.
    """

    def __init__(self, each: int, most: int) -> None:
        self._each, self._most = each, most
        self._of: Counter[object] = Counter()
        self._freed = asyncio.Condition()
        self.held = 0
        """Number of bytes currently held by all owners."""

    @contextlib.asynccontextmanager
    async def hold(self, owner: object, size: int, seconds: float) -> AsyncIterator[Callable[[int], None]]:
        """Context manager that holds bytes. Its value is a function that holds more bytes, for bodies of unknown
        length.

        Args:
            owner: The session against whose budget the bytes count.
            size: Number of bytes, as far as it is known in advance.
            seconds: Maximum time to wait for room, in seconds.

        Raises:
            Refused: the owner holds too many bytes, or there was no room in time.
        """
        held = 0
        too_many = Refused(429, f"this session's requests hold more than {self._each} bytes")

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
                # `not self._of` is True if nothing else is held. Then even a body that is larger than the whole budget
                # is admitted, because waiting would not help.
                await self._freed.wait_for(lambda: not self._of or self.held + size <= self._most)
                grow(size)
        except TimeoutError:
            raise Refused(503, "too many large requests at once; try again") from None
        try:
            yield grow
        finally:
            self._of[owner] -= held
            self.held -= held
            if not self._of[owner]:
                del self._of[owner]
            async with self._freed:
                self._freed.notify_all()
