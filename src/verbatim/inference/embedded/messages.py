"""Defines messages between event loops and the engine's thread: requests, commands, cancellations, answers."""

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
    """An answer of the engine's thread that a coroutine in an event loop waits for."""

    future: asyncio.Future[Any]
    """Set in the caller's event loop."""
    answer: tuple[Any] | None = None
    """The result or exception that the future is about to hold; None: not answered yet."""


@dataclass(eq=False, kw_only=True)
class GenerateJob(EngineReply):
    """One `generate` call."""

    request: SampleRequest
    submitted: float
    """Time of the call: seconds of `time.perf_counter`."""
    started: float = 0.0
    """Time at which it got a slot: seconds of `time.perf_counter`."""
    slot: int | None = None
    """Its slot in the decoder; None: still waiting."""
    watch: Watch | None = None
    """Called with its tokens as they are drawn, on the engine's thread."""
    num_shown: int = 0
    """Tokens that `watch` has got."""


@dataclass(eq=False, kw_only=True)
class Command(EngineReply):
    """A function to run between two steps."""

    run: Callable[[], Any]
    """Its result is the answer."""
    vital: bool
    """Whether the engine stops if it fails, because the model may be half changed."""


@dataclass(eq=False)
class Cancel:
    """The caller of this job was cancelled."""

    job: GenerateJob


@dataclass(eq=False)
class Outbox:
    """Answers of one step, delivered to each event loop in one call."""

    answers: dict[asyncio.AbstractEventLoop, list[tuple[EngineReply, Any]]] = field(default_factory=dict)
    """Undelivered answers."""

    def put(self, reply: EngineReply, answer: Any) -> None:
        """Add an answer; an exception is raised in the caller."""
        self.answers.setdefault(reply.future.get_loop(), []).append((reply, answer))

    def send(self) -> None:
        """Deliver all answers."""
        for loop, answers in self.answers.items():
            for reply, answer in answers:
                reply.answer = (answer,)
            try:
                loop.call_soon_threadsafe(deliver, [reply for reply, _ in answers])
            except RuntimeError:
                if not loop.is_closed():  # nothing waits on a closed loop
                    raise
        self.answers = {}


def deliver(replies: list[EngineReply]) -> None:
    """Set the futures of answered replies; called in their event loop."""
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
    """The fault of one request, for which so many tokens had been drawn; the engine goes on."""
    text = f"the sampler failed on this request: {failure_text(cause, 500)}"
    return _caused_by(cause, SamplerFault(text, num_tokens=num_tokens))


def failure_text(cause: Exception, limit: int) -> str:
    """The error in one line; it says "out of memory" whichever library ran out of it."""
    if not is_out_of_memory(cause):
        return error_text(cause, limit)
    said = str(cause).partition("\n")[0]
    return cut(f"out of memory: {said}" if said else "out of memory", limit)


def engine_failed(cause: BaseException, num_tokens: int = 0) -> SamplerFault:
    """The fault of every request in flight when the engine's thread failed."""
    said = describe(cause) if is_out_of_memory(cause) else f"{type(cause).__name__}: {cause}"
    return _caused_by(cause, SamplerFault(f"the sampler's thread failed: {said}", num_tokens=num_tokens))


def _caused_by(cause: BaseException, fault: SamplerFault) -> SamplerFault:
    if not is_out_of_memory(cause):  # its traceback's frames would keep their memory
        fault.__cause__ = cause
    return fault
