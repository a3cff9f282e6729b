"""Serves verifiers' episodes while they run: our sampler behind HTTP, and verifiers' own servers in front of it.

verifiers -> its train client -> our /inference/v1/generate -> the episode that the request's session names, which
samples and records the turn. So a trajectory holds what was served, with the version of every token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from verbatim.errors import RecordError
from verbatim.inference.base import Completion, Sampler, SampleRequest
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.proxy import SamplerProxy
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.loop import EpisodeOver

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The model's name between verifiers and our server."""


class Switchboard(SamplerProxy):
    """The run's sampler, whose requests are turns of the episode that they belong to."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._speaking: dict[str, tuple[AgentLoop, Any]] = {}

    def connect(self, trace: Any, loop: AgentLoop) -> None:
        """From now on, requests of this trace are turns of this episode."""
        self._speaking[trace.id] = (loop, trace)

    def disconnect(self, loop: AgentLoop) -> None:
        """The episode is over; what still comes for it is refused."""
        self._speaking = {name: who for name, who in self._speaking.items() if who[0] is not loop}

    async def generate(self, request: SampleRequest) -> Completion:
        """A turn of its episode. Where no turn or token is left, verifiers is told to stop and score, by a
        RecordError. The experts of a mixture stay in the episode's record: verifiers reads another format of them."""
        if request.session not in self._speaking:
            raise RecordError(f"session {request.session!r} is no episode under way")
        loop, trace = self._speaking[request.session]
        agent = trace.agent
        try:
            completion = await loop.complete(
                request.prompt_ids, request.params, "main" if agent.name == "agent" else agent.name,
                trained=agent.trainable,
            )  # fmt: skip
        except EpisodeOver as over:
            trace.stop(str(over.stop_reason) if over.stop_reason == "max_turns" else "context_length")
            raise RecordError(f"the episode is over: {over.stop_reason}") from None
        return replace(completion, routed_experts=None)


@dataclass(eq=False)
class Serving:
    """Up for as long as it is used, in one event loop. verifiers' servers are entered and left in one task, as their
    scopes demand, whichever episode comes first and goes last."""

    env: Any
    """verifiers' environment."""
    _users: int = 0
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _task: asyncio.Task[None] | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _up: asyncio.Future[tuple[str, Switchboard]] | None = None

    @contextlib.asynccontextmanager
    async def use(self, sampler: Sampler) -> AsyncIterator[tuple[str, Switchboard]]:
        """The address of the sampler's server, and who connects its requests with episodes."""
        async with self._changing:
            self._users += 1
            if self._users == 1:
                self._end = asyncio.Event()
                self._up = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._serve(sampler, self._up), name="verifiers-serving")
        try:
            assert self._up is not None
            yield await asyncio.shield(self._up)
        finally:
            async with self._changing:
                self._users -= 1
                if self._users == 0:
                    assert self._task is not None
                    self._end.set()
                    await asyncio.wait([self._task])
                    if not self._task.cancelled() and self._task.exception() is not None:
                        logger.warning("verifiers' servers did not end cleanly", exc_info=self._task.exception())

    async def _serve(self, sampler: Sampler, up: asyncio.Future[tuple[str, Switchboard]]) -> None:
        switchboard = Switchboard(sampler)
        try:
            async with serve_sampler(switchboard, model=MODEL) as server, self.env.serving():
                up.set_result((server.url, switchboard))
                await self._end.wait()
        except BaseException as error:
            if not up.done():
                up.set_exception(error)  # those who wait for it have to hear of it
                return
            raise
