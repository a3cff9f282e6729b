"""Defines the messages between event loops and the engine's thread: requests, commands, cancellations, replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import SamplerFault
from verbatim.core.machine_faults import describe, is_out_of_memory
from verbatim.core.texts import cut, error_text
from verbatim.inference.sampler import SampleRequest, Watch


@dataclass(eq=False, kw_only=True)
class EngineReply:
    """A reply of the engine's thread, for which a coroutine waits."""

    future: asyncio.Future[Any]
    """The future that the coroutine awaits. It is resolved in the coroutine's event loop."""
    answer: tuple[Any] | None = None
    """The result or exception for the future, in a tuple because the result itself may be None; the attribute is None
    until there is a reply."""


@dataclass(eq=False, kw_only=True)
class GenerateJob(EngineReply):
    """One `generate` call."""

    request: SampleRequest
    submitted: float
    """Time of the call, in seconds of `time.perf_counter`."""
    started: float = 0.0
    """Time when the job got a slot, in seconds of `time.perf_counter`."""
    slot: int | None = None
    """The job's slot in the decoder; None while the job waits for one."""
    watch: Watch | None = None
    """Called with new tokens on the engine's thread."""
    num_shown: int = 0
    """Number of tokens that `watch` has received."""


@dataclass(eq=False, kw_only=True)
class Command(EngineReply):
    """A function to run between two steps."""

    run: Callable[[], Any]
    """The function; its result is the reply."""
    vital: bool
    """True if a failure of the function stops the engine, because it may leave the model half changed."""


@dataclass(eq=False)
class Cancel:
    """Cancels a job."""

    job: GenerateJob


@dataclass(eq=False)
class Outbox:
    """Collects the replies of one step, and delivers them with one call to each event loop."""

    answers: dict[asyncio.AbstractEventLoop, list[tuple[EngineReply, Any]]] = field(default_factory=dict)
    """Undelivered answers."""

    def put(self, reply: EngineReply, answer: Any) -> None:
        """Add a reply, which `send` delivers. If `answer` is an exception, the exception is raised where the reply is
        awaited."""
        self.answers.setdefault(reply.future.get_loop(), []).append((reply, answer))

    def send(self) -> None:
        """Deliver all replies."""
        for loop, answers in self.answers.items():
            for reply, answer in answers:
                reply.answer = (answer,)
            try:
                loop.call_soon_threadsafe(deliver, [reply for reply, _ in answers])
            except RuntimeError:
                if not loop.is_closed():  # if the loop is closed, nobody waits for the reply
                    raise
        self.answers = {}


def deliver(replies: list[EngineReply]) -> None:
    """Resolve the futures of replies that have an answer. Called in the event loop of these futures."""
    for reply in replies:
        if reply.future.done():
            continue
        assert reply.answer is not None
        (answer,) = reply.answer
        if isinstance(answer, BaseException):
            reply.future.set_exception(answer)
        else:
            reply.future.set_result(answer)


def request_failed(cause: Exception, num_tokens: int = 0) -> SamplerFault:
    """The error for one failed request, with the number of tokens sampled for it; the engine continues."""
    text = f"the sampler failed on this request: {failure_text(cause, 500)}"
    return _caused_by(cause, SamplerFault(text, num_tokens=num_tokens))


def failure_text(cause: Exception, limit: int) -> str:
    """The error in one line. If memory ran out, the line begins with "out of memory", no matter which library raised
    the error."""
    if not is_out_of_memory(cause):
        return error_text(cause, limit)
    said = str(cause).partition("\n")[0]
    return cut(f"out of memory: {said}" if said else "out of memory", limit)


def engine_failed(cause: BaseException, num_tokens: int = 0) -> SamplerFault:
    """The error for every request in flight when the engine's thread failed."""
    said = describe(cause) if is_out_of_memory(cause) else f"{type(cause).__name__}: {cause}"
    return _caused_by(cause, SamplerFault(f"the sampler's thread failed: {said}", num_tokens=num_tokens))


def _caused_by(cause: BaseException, fault: SamplerFault) -> SamplerFault:
    if not is_out_of_memory(cause):  # the frames in its traceback would keep memory alive
        fault.__cause__ = cause
    return fault
