"""Answers the chat requests of a session: whole, or as a stream while they are sampled."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from verbatim.gateway.exchanges import Exchange
from verbatim.gateway.progress import Progress
from verbatim.gateway.session import Session
from verbatim.gateway.wire import error_response, headers_of, json_response, read_object, told
from verbatim.inference.chat.partial import Growing
from verbatim.inference.chat.protocol import (
    ChatDelta,
    ChatProtocol,
    ChatReply,
    ChatRequest,
    ChatStream,
    ProtocolRefusal,
    Stamp,
)

MODEL = "policy"
"""The model's name, for requests that name none and for lists of models; a request may name any."""
AGENT_HEADER, TRAINED_HEADER = "x-verbatim-agent", "x-verbatim-trained"
"""The headers for an agent's name, and for "false" where a turn is context only."""
THREAD_HEADERS = (
    "thread-id",  # codex: the conversation of each agent, the first one's too
    "x-claude-code-agent-id",  # Claude Code: of each sub-agent
)
"""Headers by which clients tell their agents apart. Their values are no names: they are new in each episode."""
_QUIET_SECONDS = 10.0
"""Seconds after which a stream is sent something, so that it does not look dead."""
_PAUSE = 0.02
"""Seconds between two readings of what was sampled, so that many streams leave the processor to others."""
_LARGE = 256 * 2**10
"""Bytes of a body that is read on a thread."""

Replies: TypeAlias = list[ChatReply]


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Who has sent a request, as its headers say."""

    agent: str
    """The agent's name; "" = it is not said."""
    thread: str
    """Tells the agents of a client apart; "" = it is not said."""
    trained: bool
    """Whether its tokens may be trained."""


def sender_of(headers: Mapping[str, str]) -> Sender:
    """Who has sent the request with these headers.

    >>> sender_of({"x-verbatim-agent": "critic", "thread-id": "01a2"})
    Sender(agent='critic', thread='thread-id 01a2', trained=True)
    """
    threads = (f"{name} {headers[name]}" for name in THREAD_HEADERS if headers.get(name))
    return Sender(
        agent=headers.get(AGENT_HEADER, "")[:200],
        thread=next(threads, "")[:200],
        trained=headers.get(TRAINED_HEADER, "").lower() not in ("false", "0"),
    )


def sent_before(headers: Mapping[str, str]) -> tuple[str, bool]:
    """The idempotency key of a request, and whether it says that it is a retry, as the SDKs of OpenAI and Anthropic
    do."""
    return headers.get("idempotency-key", "")[:200], headers.get("x-stainless-retry-count", "0") not in ("", "0")


def digest_of(body: bytes, *about: object) -> bytes:
    """The digest of all that an answer depends on."""
    head = "".join(f"{part}\0" for part in about).encode(errors="surrogateescape")
    return hashlib.blake2b(head + body, digest_size=16).digest()


async def answer_chat(
    session: Session, request: web.Request, body: bytes, protocol: ChatProtocol
) -> web.StreamResponse:
    """Answer a chat request.

    Args:
        session: Samples and records.
        request: The connection.
        body: The request's.
        protocol: Of the request's route.

    Raises:
        SessionRefusal: the session is over or has too many requests, or the body is no JSON object.
    """
    headers = headers_of(request)
    session.admit()
    try:
        given = read_object(body)
        asked = (
            await asyncio.to_thread(protocol.read, given, headers)
            if len(body) > _LARGE
            else protocol.read(given, headers)
        )
    except ProtocolRefusal as refusal:
        session.counts[f"refused/{refusal.field or 'request'}"] += 1
        return json_response(refusal.status, refusal.body)
    sender = sender_of(headers)
    key, is_retry = sent_before(headers)
    answering = _Answering(session, request, protocol, asked)

    async def work(progress: Progress) -> Replies:
        return await session.answer(
            asked, agent=sender.agent, thread=sender.thread, trained=sender.trained, body=given, progress=progress
        )

    try:
        exchange = await session.exchanges.open(
            work,
            digest_of(body, protocol.name, sender),
            key=key,
            is_retry=is_retry,
            progress=Progress(Stamp(created=int(time.time()), model=asked.model or MODEL), asked.n),
        )
        with session.exchanges.attend(exchange):
            await (answering.stream(exchange) if asked.stream else answering.whole(exchange))
            exchange.delivered = True
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001  answered as what it is
        return await answering.failed(error)
    return answering.response


@dataclass(eq=False)
class _Answering:
    """One connection that waits for an answer."""

    session: Session
    request: web.Request
    protocol: ChatProtocol
    asked: ChatRequest
    _response: web.StreamResponse | None = None
    _writer: ChatStream | None = None
    """Writes the parts of a stream; None where the answer is sent as a whole."""

    @property
    def response(self) -> web.StreamResponse:
        """What was sent."""
        assert self._response is not None
        return self._response

    async def whole(self, exchange: Exchange[Replies]) -> None:
        """Send the answer once it is there."""
        replies = await self.session.exchanges.wait(exchange)
        self._response = json_response(200, self.protocol.answer(self.asked, replies, exchange.progress.stamp))
        await self._response.prepare(self.request)
        await self._response.write_eof()

    async def stream(self, exchange: Exchange[Replies]) -> None:
        """Send the answer as it is sampled, as far as the sampler shows it, and the rest at its end."""
        progress = exchange.progress
        writer = self._writer = self.protocol.stream(self.asked, progress.stamp)
        growing = [Growing(index=number, ids=ids) for number, ids in enumerate(progress.ids)]
        has_begun, seen = False, 0
        while not exchange.task.done():
            if not await progress.news(seen, _QUIET_SECONDS):
                await self._send([writer.ping()])
            seen = progress.num_news
            if exchange.task.done():
                break
            deltas = [writer.delta(delta) for delta in self._gained(growing, progress)]
            if deltas and not has_begun:
                assert progress.prompt_ids is not None
                has_begun = True
                deltas.insert(0, writer.begin(len(progress.prompt_ids)))
            await self._send(deltas)
            await asyncio.wait([exchange.task], timeout=_PAUSE)
        replies = await self.session.exchanges.wait(exchange)
        if not has_begun:
            await self._send([writer.begin(replies[0].num_prompt_tokens)])
        await self._send([writer.end(replies)])
        await self.response.write_eof()

    async def failed(self, error: Exception) -> web.StreamResponse:
        """Send an error: as an event where a stream has begun."""
        status, message, kind = told(error)
        if self._response is None or self._writer is None:
            return error_response(self.protocol, status, message, kind)
        await self._send([self._writer.error(status, message)])
        await self._response.write_eof()
        return self._response

    def _gained(self, growing: Iterable[Growing], progress: Progress) -> Iterator[ChatDelta]:
        for one in growing:
            if one.is_due and progress.prompt_ids is not None:
                texts = self.session.read_partial(one.ids, self.asked, progress.prompt_ids)
                if (delta := one.gained(*texts)) is not None:
                    yield delta

    async def _send(self, events: Iterable[bytes]) -> None:
        for event in filter(None, events):
            if self._response is None:
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                self._response = web.StreamResponse(headers=headers)
                await self._response.prepare(self.request)
            await self._response.write(event)
