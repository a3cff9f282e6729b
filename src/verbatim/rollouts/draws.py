"""Sends the requests of one episode to the sampler and counts every token, whatever becomes of its completion."""

from __future__ import annotations

import asyncio

from verbatim.errors import SamplerFault
from verbatim.inference.base import Completion, Sampler, SampleRequest
from verbatim.inference.cut_off import num_tokens_drawn, num_tokens_lost, settle
from verbatim.rollouts.recorder import Recorder


class Draws:
    """Asks the sampler. Tokens are counted before their completion is delivered, and also where it never is.

    Args:
        recorder: Is told of the tokens.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._under_way: set[asyncio.Task[Completion]] = set()
        self.over = False
        """Nothing more is drawn."""
        self.num_delivered = 0
        """Tokens of completions that were handed over."""
        self.num_cut_off = 0
        """Tokens of those that were not."""

    async def draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """A completion. A call that is cancelled ends when the engine has said how many tokens it had drawn.

        Raises:
            asyncio.CancelledError: it is cancelled, or `over`.
            SamplerFault: the engine failed.
            RecordError: the recorder is closed.
        """
        if self.over:
            raise asyncio.CancelledError
        drawing = asyncio.create_task(self._draw(sampler, request))
        self._under_way.add(drawing)
        drawing.add_done_callback(self._under_way.discard)
        return await drawing

    async def _draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        try:
            completion = await sampler.generate(request)
        except (asyncio.CancelledError, SamplerFault) as end:
            self.num_cut_off += num_tokens_drawn(end)
            self._recorder.count_cut_off(num_tokens_drawn(end))
            self._recorder.count_lost(num_tokens_lost(end))
            raise
        self._recorder.count_lost(completion.num_lost_tokens)
        self.num_delivered += len(completion.ids)
        self._recorder.count(len(completion.ids))
        return completion

    async def end(self) -> bool:
        """Cut off what is under way. All tokens are counted when this returns: whether anything was."""
        self.over = True
        drawing = list(self._under_way)
        for task in drawing:
            task.cancel()
        await settle(drawing)
        return bool(drawing)
