"""An answer while it is sampled: what there is of it so far, and the events of a stream that shows it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from verbatim.core.types import Int32
from verbatim.inference.chat.partial import Growing
from verbatim.inference.chat.protocol import ChatReply, ChatStream

QUIET_SECONDS = 10.0
"""Seconds after which a stream is sent something, so that it does not look dead."""
_PAUSE = 0.02
"""Seconds between two readings of what was sampled, so that many streams leave the processor to others."""

ReadPartial = Callable[[Int32, Int32], Awaitable[tuple[str, str]]]
"""(ids, prompt) -> the thinking and the content that a reply will begin with, after these ids."""


class LiveAnswer:
    """What there is of an answer so far. Made in the event loop of those who wait for it.

    Args:
        num_replies: Replies of the answer.
        prompt_ids: int32 [P]; None: it is not rendered yet.
    """

    def __init__(self, num_replies: int = 1, prompt_ids: Int32 | None = None) -> None:
        self.ids: list[list[int]] = [[] for _ in range(num_replies)]
        """For each reply, the ids sampled so far; empty where the sampler shows none before the end."""
        self.prompt_ids = prompt_ids
        self._loop = asyncio.get_running_loop()
        self._num_news = 0
        self._news = asyncio.Event()

    def show(self, number: int, ids: Sequence[int]) -> bool:
        """Add ids of a reply, which does not end with them. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._add, number, list(ids))
        return False

    def wake(self) -> None:
        """Let all streams go on that wait for news; called at the end too."""
        self._num_news += 1
        self._news.set()
        self._news = asyncio.Event()

    def _add(self, number: int, ids: list[int]) -> None:
        self.ids[number] += ids
        self.wake()

    async def _has_news(self, seen: int) -> bool:
        """Wait for more news than were `seen`; False if there were none for `QUIET_SECONDS`."""
        if self._num_news > seen:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                await self._news.wait()
                return True
        return False

    async def events(
        self,
        stream: ChatStream,
        working: asyncio.Future[Any],
        read: ReadPartial,
        replies: Callable[[], Awaitable[Sequence[ChatReply]]],
        *,
        begins_at_once: bool = False,
    ) -> AsyncGenerator[bytes]:
        """The events of one stream, which may begin at any time: what is sampled, as far as the sampler shows it and it
        can be read, and at the end the rest. Some are empty.

        Args:
            stream: Writes the events.
            working: Samples; `wake` is called when it is done.
            read: Reads what was sampled so far.
            replies: The whole answer, once `working` is done; raises what went wrong.
            begins_at_once: Whether the first event comes before anything is sampled. Otherwise a failure until then may
                still be answered as one, and not as the end of a stream.
        """
        growing = [Growing(index=number, ids=ids) for number, ids in enumerate(self.ids)]
        has_begun, seen = begins_at_once, 0
        if begins_at_once:
            assert self.prompt_ids is not None
            yield stream.begin(len(self.prompt_ids))
        while not working.done():
            if not await self._has_news(seen):
                yield stream.ping
            seen = self._num_news
            if working.done():
                break
            for one in growing:
                if self.prompt_ids is None or not one.is_due:
                    continue
                delta = one.gained(*await read(np.array(one.ids, dtype=np.int32), self.prompt_ids))
                if delta is not None:
                    if not has_begun:
                        has_begun = True
                        yield stream.begin(len(self.prompt_ids))
                    yield stream.delta(delta)
            await asyncio.wait([working], timeout=_PAUSE)
        whole = await replies()
        if not has_begun:
            yield stream.begin(whole[0].num_prompt_tokens)
        yield stream.end(whole)
