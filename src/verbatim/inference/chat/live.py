"""A response in progress: the ids sampled so far, and the events that stream them."""

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
"""Seconds without an event after which a ping is sent, so that clients and proxies do not assume the stream is dead."""
_PAUSE = 0.02
"""Minimum seconds between two parses of a growing reply, so that many streams do not saturate the CPU."""

ReadPartial = Callable[[Int32, Int32], Awaitable[tuple[str, str]]]
"""(ids, prompt ids) -> (reasoning, content). The final reply is certain to begin with this reasoning and content."""


class LiveAnswer:
    """A response in progress. Must be created in the event loop that streams it.

    Args:
        num_replies: Number of replies in the response.
        prompt_ids: The prompt: int32 [P]; None if it is not rendered yet.
    """

    def __init__(self, num_replies: int = 1, prompt_ids: Int32 | None = None) -> None:
        self.ids: list[list[int]] = [[] for _ in range(num_replies)]
        """Ids sampled so far for each reply. They stay empty if the sampler does not report tokens as it samples
        them."""
        self.prompt_ids = prompt_ids
        self._loop = asyncio.get_running_loop()
        self._num_news = 0
        self._news = asyncio.Event()

    def show(self, number: int, ids: Sequence[int]) -> bool:
        """Add newly sampled ids to a reply. May be called on any thread. Always returns False, which for a `Watch`
        means not to end the completion."""
        self._loop.call_soon_threadsafe(self._add, number, list(ids))
        return False

    def wake(self) -> None:
        """Wake up all waiting streams. Called for new ids and at the end."""
        self._num_news += 1
        self._news.set()
        self._news = asyncio.Event()  # a new event, so that later waits react only to later news

    def _add(self, number: int, ids: list[int]) -> None:
        self.ids[number] += ids
        self.wake()

    async def _has_news(self, seen: int) -> bool:
        """Wait until `wake` has been called more than `seen` times. Returns False if this takes longer than
        `QUIET_SECONDS`."""
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
        """The events of one stream: deltas while tokens are sampled, and the rest at the end. Some events are empty. A
        stream that starts late begins with everything sampled so far.

        Args:
            stream: Writes the events.
            working: Future that completes when sampling ends; `wake` must be called then.
            read: Parses the ids sampled so far.
            replies: Called once `working` is done; returns the final replies, or raises the error of `working`.
            begins_at_once: If True, the first event is sent before anything is sampled. If False, a failure before the
                first token can still be reported by an HTTP status instead of an event.
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
