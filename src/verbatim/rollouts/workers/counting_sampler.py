"""Samples for episodes in other processes, and counts every drawn token for the attempt that requested it.

So the number of tokens lost with a worker is exact.
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
    """One attempt at an episode: its requests carry `session`, and its recorder counts their tokens."""

    def __init__(self, session: str, recorder: Recorder) -> None:
        self.session = session
        self._draws = Draws(recorder)

    @property
    def num_delivered(self) -> int:
        """Tokens of completions that were sent as answers; whether they arrived is unknown here."""
        return self._draws.num_delivered

    @property
    def num_cut_off(self) -> int:
        """Tokens drawn for requests that ended without an answer."""
        return self._draws.num_cut_off

    async def draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        """Draw and count a completion; after the attempt's end, return a cancelled one without tokens."""
        try:
            return await self._draws.draw(sampler, request)
        except asyncio.CancelledError:
            if self._draws.over:
                return nothing_sampled()
            raise

    @property
    def num_tokens(self) -> int:
        """All tokens drawn so far."""
        return self.num_delivered + self.num_cut_off

    async def give_up(self) -> None:
        """Cancel requests in flight; the counts are final afterwards."""
        await self._draws.end()


class CountingSampler(SamplerProxy):
    """A `Sampler` for the requests of registered attempts only."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._attempts: dict[str, Attempt] = {}
        self._numbers = itertools.count()

    def open(self, recorder: Recorder) -> Attempt:
        """Register a new attempt; close it when nothing waits for it."""
        found = Attempt(f"attempt-{next(self._numbers)}", recorder)
        self._attempts[found.session] = found
        return found

    def close_attempt(self, found: Attempt) -> None:
        """Refuse further requests of this attempt."""
        del self._attempts[found.session]

    async def generate(self, request: SampleRequest) -> Completion:
        """The engine's completion.

        Raises:
            SamplerFault: the attempt has ended: its worker was lost.
        """
        found = self._attempts.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(f"no episode draws as {request.session!r:.80}; it ended, or is run elsewhere by now")
        return await found.draw(self._sampler, request)
