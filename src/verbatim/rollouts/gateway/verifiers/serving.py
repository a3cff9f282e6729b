"""Serves verifiers' episodes while they run: a gateway before our sampler, verifiers' own servers before the gateway.

verifiers -> its train client -> the gateway's route for token ids -> the session of the request's trace, which samples
and records the turn. So a trajectory holds what was served, with the version of every token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import RolloutError
from verbatim.inference.cancelled import settle
from verbatim.inference.http.refused import Refused
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.gateway.delivery import AnswerProgress
from verbatim.rollouts.gateway.service import Service
from verbatim.rollouts.gateway.session import Session
from verbatim.rollouts.gateway.session_settings import SessionSettings

logger = logging.getLogger(__name__)

_STOPS = {"max_turns": "max_turns", "max_total_completion_tokens": "max_output_tokens"}
"""What verifiers calls the reason of a refusal."""


class TraceSession(Session):
    """One of verifiers' traces: an agent of an episode.

    Args:
        loop: Samples and records, for all traces of the episode.
        trace: verifiers' record, which names the agent.
    """

    def __init__(self, loop: AgentLoop, trace: Any) -> None:
        super().__init__(loop, SessionSettings(sampling="client"))
        self._trace = trace

    async def complete(
        self, request: SampleRequest, *, agent: str = "", trained: bool = True, progress: AnswerProgress | None = None
    ) -> Completion:
        """A turn of the trace's agent. Where no turn or token is left, verifiers is told to stop and score. The experts
        of a mixture stay in the episode's record: verifiers reads another format of them."""
        own = self._trace.agent
        try:
            completion = await super().complete(
                request,
                agent="main" if own.name == "agent" else own.name,
                trained=own.trainable,
                progress=progress,
            )
        except Refused as refusal:
            self._trace.stop(_STOPS.get(refusal.kind, "context_length"))
            raise
        return dataclasses.replace(completion, routed_experts=None)


@dataclass(eq=False)
class Reception:
    """Where verifiers' client asks: one key for all traces, since it keeps its connections for each address. Requests
    name their trace."""

    service: Service
    key: str
    _traces: dict[AgentLoop, dict[str, TraceSession]] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """For verifiers' client, with the key in it."""
        return f"{self.service.url}/s/{self.key}/v1"

    def connect(self, trace: Any, loop: AgentLoop) -> None:
        """From now on, requests of this trace are turns of this episode."""
        session = self._traces.setdefault(loop, {})[trace.id] = TraceSession(loop, trace)
        self.service.join(self.key, trace.id, session)

    async def disconnect(self, loop: AgentLoop) -> RolloutError | None:
        """The episode is over: what is under way is cancelled, and what still comes for it is refused. Returns the
        failure of the sampler or of the record that one of its requests was answered with."""
        sessions = self._traces.pop(loop, {})
        for name in sessions:
            self.service.leave(self.key, name)
        await settle([asyncio.ensure_future(session.end()) for session in sessions.values()])
        return next((session.fault for session in sessions.values() if session.fault is not None), None)


@dataclass(eq=False)
class VerifiersServing:
    """Up for as long as it is used, in one event loop. verifiers' servers are entered and left in one task, as their
    scopes demand, whichever episode comes first and goes last."""

    env: Any
    """verifiers' environment."""
    _users: int = 0
    _task: asyncio.Task[None] | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _up: asyncio.Future[Reception] | None = None

    @contextlib.asynccontextmanager
    async def use(self, context_length: int) -> AsyncIterator[Reception]:
        """Where verifiers asks, and who connects its requests with episodes.

        Args:
            context_length: The sampler's.
        """
        if self._users == 0:
            self._end = asyncio.Event()
            self._up = asyncio.get_running_loop().create_future()
            serve = self._serve(context_length, self._up, self._end, self._task)
            self._task = asyncio.create_task(serve, name="verifiers-serving")
        self._users += 1
        task, up = self._task, self._up
        assert task is not None and up is not None
        try:
            yield await asyncio.shield(up)
        finally:
            self._users -= 1
            if self._users == 0:
                self._end.set()
                await settle([task])  # also where the episode is cancelled once more: nothing is left open

    async def _serve(
        self, context_length: int, up: asyncio.Future[Reception], end: asyncio.Event, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        service = Service()
        try:
            await service.start()
            async with self.env.serving():
                up.set_result(Reception(service, service.open_group(context_length)))
                await end.wait()
        except BaseException as error:
            if not up.done():
                up.set_exception(error)  # those who wait for it have to hear of it
                return
            if not isinstance(error, Exception):
                raise
            logger.warning("verifiers' servers did not end cleanly", exc_info=error)
        finally:
            await service.close()
