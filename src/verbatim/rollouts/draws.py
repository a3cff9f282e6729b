"""Sends requests to the sampler and counts every token for its episode, whatever becomes of the completion; also for
episodes in other processes, so that the number of tokens lost with a worker is exact."""

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
    """Asks the sampler. The recorder counts tokens before their completion is delivered, and also where it never is."""

    def __init__(self, recorder: Recorder, session: str = "") -> None:
        self._recorder, self.session = recorder, session
        self._under_way: set[asyncio.Task[Completion]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._caller: asyncio.Task[Any] | None = None
        """The one that a call of `draw_alone` runs on."""
        self._left: asyncio.Future[None] | None = None
        """Done when that call has ended; made where `end` waits for it."""
        self.over = False
        """Nothing more is drawn."""
        self.num_delivered = 0
        """Tokens of completions that were handed over; whether they arrived in another process is unknown here."""
        self.num_cancelled = 0
        """Tokens of those that were not."""

    async def draw(self, sampler: Sampler, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """A completion, watched while it is drawn where the sampler shows its tokens. A call that is cancelled, by its
        caller or because it is all `over`, ends when the engine has said how many tokens it had drawn."""
        if self.over:
            raise asyncio.CancelledError
        drawing = asyncio.create_task(self._draw(sampler, request, watch))
        self._under_way.add(drawing)
        drawing.add_done_callback(self._under_way.discard)
        return await drawing

    async def draw_alone(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """As `draw`, for one call at a time: without a task of its own. Where it is all `over`, the caller's task is
        cancelled."""
        if self.over:
            raise asyncio.CancelledError
        assert self._caller is None
        self._loop = self._loop or asyncio.get_running_loop()
        self._caller = asyncio.current_task(self._loop)  # without it Python asks the system for the process's id
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
        self._recorder.count_lost(completion.num_lost_tokens)
        self.num_delivered += len(completion.ids)
        self._recorder.count(len(completion.ids))
        self._recorder.refuse_other_experts(completion.routed_experts)
        return completion

    @property
    def num_tokens(self) -> int:
        """All tokens drawn so far."""
        return self.num_delivered + self.num_cancelled

    async def end(self) -> bool:
        """Cut off what is under way. All tokens are counted when this returns: whether anything was."""
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
    """A `Sampler` for the requests of registered attempts only."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._attempts: dict[str, Draws] = {}
        self._numbers = itertools.count()

    def open(self, recorder: Recorder) -> Draws:
        """Register a new attempt at an episode, whose requests carry its session; close it when nothing waits for it
        any more."""
        found = Draws(recorder, f"attempt-{next(self._numbers)}")
        self._attempts[found.session] = found
        return found

    def close_attempt(self, found: Draws) -> None:
        """Refuse further requests of this attempt."""
        del self._attempts[found.session]

    async def generate(self, request: SampleRequest) -> Completion:
        """The engine's completion; after the attempt's end a cancelled one without tokens, and once it is closed a
        SamplerFault."""
        found = self._attempts.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(f"no episode draws as {request.session!r:.80}; it ended, or is run elsewhere by now")
        try:
            return await found.draw(self._sampler, request)
        except asyncio.CancelledError:
            if found.over:
                return nothing_sampled()
            raise
