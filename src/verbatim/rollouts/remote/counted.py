"""The sampler that episodes elsewhere draw from: every token is counted here, as it is drawn, for the try it is for.

What an actor takes with it when it is lost is so known to the token.
"""

from __future__ import annotations

import asyncio
import itertools

from verbatim.errors import SamplerFault
from verbatim.inference.base import Completion, Sampler, SampleRequest, nothing_sampled
from verbatim.inference.borrowed import BorrowedSampler
from verbatim.rollouts.recorder import Recorder


class Try:
    """One playing of an episode: its requests carry `session`, and their tokens go to its recorder's count."""

    def __init__(self, session: str, recorder: Recorder) -> None:
        self.session = session
        self.num_tokens = 0
        """Drawn so far."""
        self._recorder = recorder
        self._drawing: set[asyncio.Task[Completion]] = set()
        self._given_up = False

    async def draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """A completion, counted before anybody else sees it; once the try is given up, a cancelled one of no tokens."""
        drawing = asyncio.create_task(self._draw(sampler, request))
        self._drawing.add(drawing)
        drawing.add_done_callback(self._drawing.discard)
        try:
            return await drawing
        except asyncio.CancelledError:
            if self._given_up:
                return nothing_sampled()
            raise

    async def _draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        if self._given_up:
            return nothing_sampled()
        completion = await sampler.generate(request)
        self.num_tokens += len(completion.ids)
        self._recorder.count(len(completion.ids))
        return completion

    async def give_up(self) -> None:
        """Cancel what is being drawn: `num_tokens` is final afterwards."""
        self._given_up = True
        drawing = list(self._drawing)
        for task in drawing:
            task.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)


class CountedSampler(BorrowedSampler):
    """A `Sampler` for the requests of known tries only; weights are not changed through it."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._tries: dict[str, Try] = {}
        self._numbers = itertools.count()

    def open(self, recorder: Recorder) -> Try:
        """Let another try draw; close it when nobody waits for it any more."""
        found = Try(f"try-{next(self._numbers)}", recorder)
        self._tries[found.session] = found
        return found

    def close_try(self, found: Try) -> None:
        """Requests for this try are refused from here on."""
        del self._tries[found.session]

    async def generate(self, request: SampleRequest) -> Completion:
        """The engine's completion.

        Raises:
            SamplerFault: no such try is under way: its actor was given up for lost.
        """
        found = self._tries.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(f"no episode draws as {request.session!r:.80}; it ended, or is played elsewhere by now")
        return await found.draw(self._sampler, request)
