"""Sends requests to the sampler and counts every sampled token for its episode, even if the completion is cancelled or
its worker dies: the number of lost tokens is exact."""

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
    """Sends an episode's requests to a sampler. Tokens are counted in the recorder before the completion is delivered,
    so they are counted even if it is never delivered."""

    def __init__(self, recorder: Recorder, session: str = "") -> None:
        self._recorder, self.session = recorder, session
        self._under_way: set[asyncio.Task[Completion]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._caller: asyncio.Task[Any] | None = None
        """The task that is inside `draw_alone`."""
        self._left: asyncio.Future[None] | None = None
        """Future that is done when that call has ended. Created only if `end` has to wait for the call."""
        self.over = False
        """True once the episode has ended; further requests are refused."""
        self.num_delivered = 0
        """Number of tokens in completions returned to the caller. They may still be lost on the way to another
        process."""
        self.num_cancelled = 0
        """Number of tokens in completions that were cancelled or failed."""

    async def draw(self, sampler: Sampler, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """Sample a completion; a sampler that streams shows its tokens to `watch`. A call that is cancelled, by its
        caller or by `end`, returns only after the engine has reported how many tokens it sampled."""
        if self.over:
            raise asyncio.CancelledError
        drawing = asyncio.create_task(self._draw(sampler, request, watch))
        self._under_way.add(drawing)
        drawing.add_done_callback(self._under_way.discard)
        return await drawing

    async def draw_alone(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """Like `draw`, for one call at a time and without a separate task, which is faster. `end` cancels the caller's
        task."""
        if self.over:
            raise asyncio.CancelledError
        assert self._caller is None
        self._loop = self._loop or asyncio.get_running_loop()
        # The loop is passed in because looking up the running one makes Python ask the system for the process id.
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
        any."""
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
    """A `Sampler` that serves episodes in other processes, and counts their tokens here: a worker that dies cannot
    report them. Only requests of registered attempts are served."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._attempts: dict[str, Draws] = {}
        self._numbers = itertools.count()

    def open(self, recorder: Recorder) -> Draws:
        """Register a new attempt at an episode. Its requests must carry the returned session. Call `close_attempt` once
        no more requests can arrive."""
        found = Draws(recorder, f"attempt-{next(self._numbers)}")
        self._attempts[found.session] = found
        return found

    def close_attempt(self, found: Draws) -> None:
        """Refuse further requests of this attempt."""
        del self._attempts[found.session]

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample for a registered attempt. After the attempt has ended this returns an empty, cancelled completion;
        after it was closed, it raises a SamplerFault."""
        found = self._attempts.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(
                f"no episode has the session {request.session!r:.80}; it has ended, or now runs on another worker"
            )
        try:
            return await found.draw(self._sampler, request)
        except asyncio.CancelledError:
            if found.over:
                return nothing_sampled()
            raise
