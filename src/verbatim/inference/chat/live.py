"""A response in progress: the ids sampled so far, and the events of the streams that show them."""

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
"""Seconds without an event after which a ping is sent, so that clients and proxies do not take the stream for dead."""
_PAUSE = 0.02
"""Minimum seconds between two parses of a growing reply, so that many streams do not use up the CPU."""

ReadPartial = Callable[[Int32, Int32], Awaitable[tuple[str, str]]]
"""(ids, prompt ids) -> (reasoning, content) that the reply is certain to begin with."""


class LiveAnswer:
    """A response in progress. Must be created in the event loop that streams it.

    Args:
        num_replies: Number of replies in the response.
        prompt_ids: The prompt: int32 [P]; None: not rendered yet.
    """

    def __init__(self, num_replies: int = 1, prompt_ids: Int32 | None = None) -> None:
        self.ids: list[list[int]] = [[] for _ in range(num_replies)]
        """Ids sampled so far, for each reply; empty until the end if the sampler does not show tokens."""
        self.prompt_ids = prompt_ids
        self._loop = asyncio.get_running_loop()
        self._num_news = 0
        self._news = asyncio.Event()

    def show(self, number: int, ids: Sequence[int]) -> bool:
        """Add sampled ids of a reply; always returns False, so that as a `Watch` it never ends the completion. May be
        called on any thread."""
        self._loop.call_soon_threadsafe(self._add, number, list(ids))
        return False

    def wake(self) -> None:
        """Wake up all waiting streams; also called at the end."""
        self._num_news += 1
        self._news.set()
        self._news = asyncio.Event()  # a new event, so that the next wait is for later news

    def _add(self, number: int, ids: list[int]) -> None:
        self.ids[number] += ids
        self.wake()

    async def _has_news(self, seen: int) -> bool:
        """Wait until there is more news than `seen`; returns False if there was none for `QUIET_SECONDS`."""
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
        """The events of one stream: deltas while tokens are sampled, and the rest at the end. Some are empty. A stream
        may start late; it then begins with everything sampled so far.

        Args:
            stream: Writes the events.
            working: The future of the sampling; `wake` must be called when it is done.
            read: Parses the ids sampled so far.
            replies: Returns the final replies once `working` is done, or raises its error.
            begins_at_once: True to send the first event before anything is sampled. Otherwise a failure before the
                first token can still be sent with its own status, instead of as an event.
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
