"""Sampler for episodes in other processes: counts every token as it is drawn, for the attempt that asked for it.

So what a worker takes with it when it is lost is known to the token.
"""

from __future__ import annotations

import asyncio
import itertools

from verbatim.errors import SamplerFault
from verbatim.inference.base import Completion, Sampler, SampleRequest, nothing_sampled
from verbatim.inference.proxy import SamplerProxy
from verbatim.rollouts.draws import Draws
from verbatim.rollouts.recorder import Recorder


class Attempt:
    """One attempt at an episode: its requests carry `session`, and their tokens go to its recorder's count."""

    def __init__(self, session: str, recorder: Recorder) -> None:
        self.session = session
        self._draws = Draws(recorder)

    @property
    def num_delivered(self) -> int:
        """Tokens of completions that were answered with; where the answer got through is not known here."""
        return self._draws.num_delivered

    @property
    def num_cut_off(self) -> int:
        """Tokens that were drawn for requests which ended without an answer."""
        return self._draws.num_cut_off

    async def draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """A completion, counted before any caller sees it; once the attempt has ended, a cancelled one of no tokens."""
        try:
            return await self._draws.draw(sampler, request)
        except asyncio.CancelledError:
            if self._draws.over:
                return nothing_sampled()
            raise

    @property
    def num_tokens(self) -> int:
        """All tokens that were drawn so far."""
        return self.num_delivered + self.num_cut_off

    async def give_up(self) -> None:
        """Cut off what is being drawn: the counts are final afterwards."""
        await self._draws.end()


class CountingSampler(SamplerProxy):
    """A `Sampler` for the requests of known attempts only; weights are not changed through it."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._attempts: dict[str, Attempt] = {}
        self._numbers = itertools.count()

    def open(self, recorder: Recorder) -> Attempt:
        """Let another attempt draw; close it when nothing waits for it any more."""
        found = Attempt(f"attempt-{next(self._numbers)}", recorder)
        self._attempts[found.session] = found
        return found

    def close_attempt(self, found: Attempt) -> None:
        """Requests for this attempt are refused from here on."""
        del self._attempts[found.session]

    async def generate(self, request: SampleRequest) -> Completion:
        """The engine's completion.

        Raises:
            SamplerFault: no such attempt is under way: its worker was given up for lost.
        """
        found = self._attempts.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(f"no episode draws as {request.session!r:.80}; it ended, or is run elsewhere by now")
        return await found.draw(self._sampler, request)
