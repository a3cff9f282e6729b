"""Serves verifiers' episodes while they run. Requests go to verifiers' own servers, then to a gateway, then to our
sampler.

verifiers' train client sends a request to the gateway's route for token ids. There the session of the request's trace
samples and records the turn. So a trajectory has exactly the tokens that were served, with their policy versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

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
"""The stop condition of verifiers that corresponds to each of our limits. A request that exceeds the limit is
refused."""


class TraceSession(Session):
    """The session of one of verifiers' traces. A trace belongs to one agent of an episode.

    Args:
        loop: Samples and records the turns of all traces of the episode.
        trace: verifiers' trace, which names the agent.
    """

    def __init__(self, loop: AgentLoop, trace: Any) -> None:
        super().__init__(loop, SessionSettings(sampling="client"))
        self._trace = trace

    async def complete(
        self, request: SampleRequest, *, agent: str = "", trained: bool = True, progress: AnswerProgress | None = None
    ) -> Completion:
        """Sample a turn of the trace's agent. If no turns or tokens are left, the trace is stopped, so that verifiers
        scores it. Routed experts are recorded but not returned, because verifiers expects a different format."""
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
    """The address to which verifiers' client sends requests. All traces share one key, because the client keeps a
    connection pool for each URL; a header of each request names the trace."""

    service: Service
    key: str
    _traces: dict[AgentLoop, dict[str, TraceSession]] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """The base URL for verifiers' client. It contains the key."""
        return f"{self.service.url}/s/{self.key}/v1"

    def connect(self, trace: Any, loop: AgentLoop) -> None:
        """From now on, record the requests of this trace as turns of this episode."""
        session = self._traces.setdefault(loop, {})[trace.id] = TraceSession(loop, trace)
        self.service.join(self.key, trace.id, session)

    async def disconnect(self, loop: AgentLoop) -> RolloutError | None:
        """End the episode's sessions: cancel their requests in flight, and refuse later requests. Returns the first
        sampler or record fault that was the answer to a request, or None."""
        sessions = self._traces.pop(loop, {})
        for name in sessions:
            self.service.leave(self.key, name)
        await settle([asyncio.ensure_future(session.end()) for session in sessions.values()])
        return next((session.fault for session in sessions.values() if session.fault is not None), None)


class _LoopLock:
    """A lock for each event loop, in the place of the one lock per process that `renderers.client` has.

    verifiers' requests take it to find out the context length of a new URL. An asyncio lock belongs to the event loop
    in which a task first waited for it. In any other loop (another thread's, or that of the program's second
    `asyncio.run`), every request that has to wait would fail.
    """

    def __init__(self) -> None:
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def __aenter__(self) -> None:
        await self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()).acquire()

    async def __aexit__(self, *error: object) -> None:
        self._locks[asyncio.get_running_loop()].release()


_LOCK = _LoopLock()


@dataclass(eq=False)
class VerifiersServing:
    """verifiers' servers and the gateway of one event loop, which run as long as an episode uses them. A dedicated
    asyncio task enters and exits the context managers of the servers. Their cancel scopes require that one task does
    both, but the first and the last episode run on different tasks."""

    env: Any
    """The environment object of verifiers."""
    _users: int = 0
    _task: asyncio.Task[None] | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _up: asyncio.Future[Reception] | None = None

    @contextlib.asynccontextmanager
    async def use(self, context_length: int) -> AsyncIterator[Reception]:
        """Context manager in which the servers run. The first user starts the servers, and the last user stops them.

        Args:
            context_length: The sampler's context length in tokens.
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
                await settle([task])  # even if the episode is cancelled again, so that nothing is left open

    async def _serve(
        self, context_length: int, up: asyncio.Future[Reception], end: asyncio.Event, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        if client := sys.modules.get("renderers.client"):
            client._max_prompt_len_lock = _LOCK  # type: ignore[attr-defined]
        service = Service()
        try:
            await service.start()
            async with self.env.serving():
                up.set_result(Reception(service, service.open_group(context_length)))
                await end.wait()
        except BaseException as error:
            if not up.done():
                up.set_exception(error)  # or the episodes that wait for `up` would wait forever
                return
            if not isinstance(error, Exception):
                raise
            logger.warning("verifiers' servers did not shut down cleanly", exc_info=error)
        finally:
            await service.close()
