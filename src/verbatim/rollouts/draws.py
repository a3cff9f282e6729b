"""Sends requests to the sampler and counts every sampled token for its episode, even if the completion is cancelled or
the worker dies. So the number of lost tokens is exact."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from verbatim.core.errors import SamplerFault
from verbatim.inference.cancelled import num_tokens_drawn, num_tokens_lost, settle
from verbatim.inference.proxy import SamplerProxy
from verbatim.inference.sampler import Completion, Sampler, SampleRequest, Watch, generate_watched, nothing_sampled
from verbatim.rollouts.recorder import Recorder


class Draws:
    """Sends an episode's requests to a sampler. The recorder counts the tokens before the completion is delivered, so
    that they are counted even if the completion is never delivered."""

    def __init__(self, recorder: Recorder, session: str = "") -> None:
        self._recorder, self.session = recorder, session
        self._under_way: set[asyncio.Task[Completion]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._caller: asyncio.Task[Any] | None = None
        """The task that is inside `draw_alone`, or None."""
        self._left: asyncio.Future[None] | None = None
        """Future that is done when the call of `draw_alone` has ended. Created only if `end` has to wait for that
        call."""
        self.over = False
        """True once the episode has ended; further requests are refused."""
        self.num_delivered = 0
        """Number of tokens in completions that were returned to the caller. They may still be lost on their way to
        another process."""
        self.num_cancelled = 0
        """Number of tokens in completions that were cancelled or failed."""

    async def draw(self, sampler: Sampler, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """Sample a completion. A sampler that streams also passes its tokens to `watch`. A call that is cancelled, by
        its caller or by `end`, returns only after the engine has reported how many tokens it sampled."""
        if self.over:
            raise asyncio.CancelledError
        drawing = asyncio.create_task(self._draw(sampler, request, watch))
        self._under_way.add(drawing)
        drawing.add_done_callback(self._under_way.discard)
        return await drawing

    async def draw_alone(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """Sample a completion as `draw` does, but faster: without a separate task. Only one call at a time is
        permitted, and `end` cancels the caller's task."""
        if self.over:
            raise asyncio.CancelledError
        assert self._caller is None
        self._loop = self._loop or asyncio.get_running_loop()
        # The loop is passed in, because Python asks the system for the process id when it looks up the running loop.
        self._caller = asyncio.current_task(self._loop)
        try:
            return await self._draw(sampler, request, None)
        finally:
            self._caller = None
            if self._left is not None:
                self._left.set_result(None)

    async def _draw(self, sampler: Sampler, request: SampleRequest, watch: Watch | None) -> Completion:
        try:
            drawing = sampler.generate(request) if watch is None else generate_watched(sampler, request, watch)
            completion = await drawing
        except (asyncio.CancelledError, SamplerFault) as end:
            self.num_cancelled += num_tokens_drawn(end)
            self._recorder.count_cancelled(num_tokens_drawn(end))
            self._recorder.count_lost(num_tokens_lost(end))
            raise
        # `count` is called last, because it raises if the episode has ended.
        self._recorder.count_lost(completion.num_lost_tokens)
        self.num_delivered += len(completion.ids)
        self._recorder.count(len(completion.ids))
        self._recorder.refuse_other_experts(completion.routed_experts)
        return completion

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return self.num_delivered + self.num_cancelled

    async def end(self) -> bool:
        """Cancel the requests in flight. When this returns, all of their tokens are counted. Returns True if there were
        any requests in flight."""
        self.over = True
        drawing: list[asyncio.Future[Any]] = list(self._under_way)
        for task in drawing:
            task.cancel()
        if self._caller is not None:
            assert self._caller is not asyncio.current_task()
            self._caller.cancel()
            self._left = self._left or asyncio.get_running_loop().create_future()
            drawing.append(self._left)
        await settle(drawing)
        return bool(drawing)


class CountingSampler(SamplerProxy):
    """A `Sampler` that serves episodes in other processes. It counts their tokens in this process, because a worker
    that dies cannot report them. Only requests of registered attempts are served."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._attempts: dict[str, Draws] = {}
        self._numbers = itertools.count()

    def open(self, recorder: Recorder) -> Draws:
        """Register a new attempt to run an episode. The requests of the attempt must carry the session of the returned
        `Draws`. Call `close_attempt` once no more requests can arrive."""
        found = Draws(recorder, f"attempt-{next(self._numbers)}")
        self._attempts[found.session] = found
        return found

    def close_attempt(self, found: Draws) -> None:
        """Refuse further requests of this attempt."""
        del self._attempts[found.session]

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample for a registered attempt. After the attempt has ended, return an empty completion that is marked as
        cancelled. After the attempt was closed, raise a SamplerFault."""
        found = self._attempts.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(
                f"no episode has the session {request.session!r:.80}; its episode has ended, or now runs on "
                "another worker"
            )
        try:
            return await found.draw(self._sampler, request)
        except asyncio.CancelledError:
            if found.over:
                return nothing_sampled()
            raise
