"""Keeps what has been sampled of an answer so far, for every stream that shows it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from verbatim.core.types import Int32
from verbatim.inference.chat.protocol import Stamp


class Progress:
    """One answer while it is sampled. Made in the event loop of those who wait for it.

    Args:
        stamp: Identifies the answer, in each of its streams.
        num_replies: Replies of the answer.
    """

    def __init__(self, stamp: Stamp, num_replies: int = 1) -> None:
        self.stamp = stamp
        self.ids: list[list[int]] = [[] for _ in range(num_replies)]
        """For each reply, the ids sampled so far; empty where the sampler shows none before the end."""
        self.prompt_ids: Int32 | None = None
        """int32 [P]; None until it has been rendered."""
        self.turns: list[int] = []
        """The turns of the replies, as they are recorded."""
        self.num_waiting = 0
        """Clients that wait for the answer."""
        self._loop = asyncio.get_running_loop()
        self.num_news = 0
        """How often there were news."""
        self._news = asyncio.Event()

    def show(self, number: int, ids: Sequence[int]) -> None:
        """Add ids of a reply. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._add, number, list(ids))

    def wake(self) -> None:
        """Let all go on that wait for news."""
        self.num_news += 1
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, seen: int, seconds: float) -> bool:
        """Wait for more news than were `seen`, by `num_news`; False if there were none for so long."""
        if self.num_news > seen:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
                return True
        return False

    def _add(self, number: int, ids: list[int]) -> None:
        self.ids[number] += ids
        self.wake()
