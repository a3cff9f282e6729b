"""The sampler that episodes elsewhere draw from: every token is counted here, as it is drawn, for the try it is for.

What an actor takes with it when it is lost is so known to the token.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np

from verbatim.errors import SamplerFault
from verbatim.inference.base import Completion, Sampler, SampleRequest
from verbatim.rollouts.recorder import Recorder
from verbatim.types import Float32, Int32, StopReason


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
                return _nothing_drawn()
            raise

    async def _draw(self, sampler: Sampler, request: SampleRequest) -> Completion:
        if self._given_up:
            return _nothing_drawn()
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


class CountedSampler:
    """A `Sampler` for the requests of known tries only; weights are not changed through it."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
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

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self._sampler.context_length

    @property
    def vocab_size(self) -> int:
        """The engine's."""
        return self._sampler.vocab_size

    @property
    def policy_version(self) -> int:
        """The engine's."""
        return self._sampler.policy_version

    async def generate(self, request: SampleRequest) -> Completion:
        """The engine's completion.

        Raises:
            SamplerFault: no such try is under way: its actor was given up for lost.
        """
        found = self._tries.get(request.session.partition("/")[0])
        if found is None:
            raise SamplerFault(f"no episode draws as {request.session!r:.80}; it ended, or is played elsewhere by now")
        return await found.draw(self._sampler, request)

    async def update_weights(self, path: Path, version: int) -> None:
        """Refused.

        Raises:
            SamplerFault: always.
        """
        raise SamplerFault("the run loads its weights itself")

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """The engine's."""
        return await self._sampler.prompt_logprobs(token_ids, temperature)

    async def close(self) -> None:
        """Nothing: the engine is not this one's to stop."""


def _nothing_drawn() -> Completion:
    return Completion(
        ids=np.empty(0, dtype=np.int32), logprobs=np.empty(0, dtype=np.float32),
        policy_versions=np.empty(0, dtype=np.int32), stop_reason=StopReason.CANCELLED,
    )  # fmt: skip
