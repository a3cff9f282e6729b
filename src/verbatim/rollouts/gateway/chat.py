"""Answers the chat requests of a session: whole, or as a stream while they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request

from verbatim.core.types import Int32
from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.messages import text_of_all
from verbatim.inference.chat.protocol import (
    ChatProtocol,
    ChatReply,
    ChatRequest,
    ChatStream,
    ProtocolRefusal,
    Stamp,
)
from verbatim.inference.http.json_size import LARGE, MOST_VALUES
from verbatim.inference.http.limits import most_text
from verbatim.rollouts.gateway.exchanges import Exchange
from verbatim.rollouts.gateway.progress import Progress
from verbatim.rollouts.gateway.session import Session
from verbatim.rollouts.gateway.session_settings import SessionRefusal
from verbatim.rollouts.gateway.wire import Reply, headers_of, read_object, told
from verbatim.rollouts.turn_arguments import LONGEST_NAME

MODEL = "policy"
"""The model's name, for requests that name none and for lists of models; a request may name any."""
AGENT_HEADER, TRAINED_HEADER = "x-verbatim-agent", "x-verbatim-trained"
"""The headers for an agent's name, and for "false" where a turn is context only."""
_TRAINED = {"true": True, "1": True, "false": False, "0": False}
THREAD_HEADERS = (
    "thread-id",  # codex: the conversation of each agent, the first one's too
    "x-claude-code-agent-id",  # Claude Code: of each sub-agent
)
"""Headers by which clients tell their agents apart. Their values are no names: they are new in each episode."""
_LONGEST_KEPT = 200

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

    Raises:
        SessionRefusal: it does not say in a known word whether its tokens may be trained, or its name is too long.
    """
    trained = headers.get(TRAINED_HEADER, "true").strip().lower()
    if trained not in _TRAINED:
        raise SessionRefusal(400, f'the header X-Verbatim-Trained is {trained!r:.80}; expected "true" or "false"')
    agent = headers.get(AGENT_HEADER, "")
    if len(agent) > LONGEST_NAME:
        raise SessionRefusal(
            400, f"the header X-Verbatim-Agent has {len(agent):,} characters; expected at most {LONGEST_NAME}"
        )
    threads = (f"{name} {headers[name]}" for name in THREAD_HEADERS if headers.get(name))
    return Sender(agent=agent, thread=_short(next(threads, "")), trained=_TRAINED[trained])


def _short(text: str) -> str:
    """What is kept of a text that is only compared: of a long one its digest."""
    if len(text) <= _LONGEST_KEPT:
        return text
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def sent_before(headers: Mapping[str, str]) -> tuple[str, bool]:
    """The idempotency key of a request, and whether it says that it is a retry, as the SDKs of OpenAI and Anthropic
    do."""
    return _short(headers.get("idempotency-key", "")), headers.get("x-stainless-retry-count", "0") not in ("", "0")


def digest_of(body: bytes | bytearray, *about: object) -> bytes:
    """The digest of all that an answer depends on."""
    head = "".join(f"{part}\0" for part in about).encode(errors="surrogateescape")
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(body)
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class ReadChat:
    """A chat request that has been read; its body is let go of."""

    asked: ChatRequest
    given: Mapping[str, object]
    """The body's JSON."""
    sender: Sender
    digest: bytes
    """Of all that the answer depends on."""


async def read_chat(
    session: Session, request: Request, body: bytearray, protocol: ChatProtocol, *, is_count: bool = False
) -> ReadChat | ProtocolRefusal:
    """Read the body of a chat request, a large one on a thread; or why its protocol refuses it.

    Raises:
        SessionRefusal: no JSON object, too many values, or more text than the session's context can hold.
    """
    headers = headers_of(request)
    room = min(session.loop.limits.max_context, session.loop.sampler.context_length)

    def read() -> ReadChat:
        given = read_object(body, MOST_VALUES)
        if is_count and isinstance(protocol, AnthropicMessages):
            asked = protocol.read_count(given, headers)
        else:
            asked = protocol.read(given, headers)
        sender = sender_of(headers)
        if max(text_of_all(asked.messages), text_of_all(asked.tools)) > most_text(room):
            raise session.too_long()
        return ReadChat(asked=asked, given=given, sender=sender, digest=digest_of(body, protocol.name, sender))

    try:
        return await asyncio.to_thread(read) if len(body) > LARGE else read()
    except ProtocolRefusal as refusal:
        session.counts[f"refused/{refusal.field or 'request'}"] += 1
        return refusal


async def answer_chat(session: Session, request: Request, chat: ReadChat, protocol: ChatProtocol, reply: Reply) -> None:
    """Answer a chat request.

    Args:
        session: Samples and records.
        request: Its head.
        chat: Its body, read.
        protocol: Of the request's route.
        reply: Writes the answer.

    Raises:
        ConnectionError: the client went while its answer was written.
    """
    asked, given, sender = chat.asked, chat.given, chat.sender
    key, is_retry = sent_before(headers_of(request))
    answering = _Answering(session, reply, protocol, asked)

    async def work(progress: Progress) -> Replies:
        return await session.answer(
            asked, agent=sender.agent, thread=sender.thread, trained=sender.trained, body=given, progress=progress
        )

    try:
        exchange = await session.exchanges.open(
            work,
            chat.digest,
            key=key,
            is_retry=is_retry,
            progress=Progress(Stamp(created=int(time.time()), model=asked.model or MODEL), asked.n),
        )
        with session.exchanges.attend(exchange):
            await (answering.stream(exchange) if asked.stream else answering.whole(exchange))
            session.delivered(exchange)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001  answered as what it is
        await answering.failed(error)


@dataclass(eq=False)
class _Answering:
    """One connection that waits for an answer."""

    session: Session
    reply: Reply
    protocol: ChatProtocol
    asked: ChatRequest
    _writer: ChatStream | None = None
    """Writes the parts of a stream; None where the answer is sent as a whole."""

    async def whole(self, exchange: Exchange[Replies]) -> None:
        """Send the answer once it is there."""
        replies = await self.session.exchanges.wait(exchange)
        await self.reply.whole(200, self.protocol.answer(self.asked, replies, exchange.progress.stamp))

    async def stream(self, exchange: Exchange[Replies]) -> None:
        """Send the answer as it is sampled, as far as the sampler shows it, and the rest at its end."""
        session, asked, progress = self.session, self.asked, exchange.progress
        writer = self._writer = self.protocol.stream(asked, progress.stamp)

        async def read(ids: Sequence[int], prompt_ids: Int32) -> tuple[str, str]:
            return session.read_partial(ids, asked, prompt_ids)

        events = progress.events(writer, exchange.task, read, lambda: session.exchanges.wait(exchange))
        async with contextlib.aclosing(events):
            async for event in events:
                await self._send(event)
        session.delivered(exchange)  # a client may go as soon as it has the last event
        await self.reply.end()

    async def failed(self, error: Exception) -> None:
        """Send an error: as an event where a stream has begun."""
        status, message, kind = told(error)
        if not self.reply.has_begun or self._writer is None:
            await self.reply.error(self.protocol, status, message, kind)
            return
        await self._send(self._writer.error(status, message))
        await self.reply.end()

    async def _send(self, event: bytes) -> None:
        if event:
            await self.reply.event(event)
