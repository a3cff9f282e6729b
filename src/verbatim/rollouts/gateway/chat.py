"""Answers the chat requests of a session, with one body or with a stream."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request

from verbatim.core.types import Int32
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.messages import text_of_all
from verbatim.inference.chat.partial import partial_texts
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp
from verbatim.inference.http.exchange import ResponseWriter
from verbatim.inference.http.json_size import LARGE
from verbatim.inference.http.limits import most_text
from verbatim.inference.http.refused import Refused
from verbatim.inference.http.request_body import read_json
from verbatim.rollouts.gateway.delivery import AnswerProgress
from verbatim.rollouts.gateway.session import Session
from verbatim.rollouts.gateway.wire import headers_of
from verbatim.rollouts.turn_arguments import LONGEST_NAME

MODEL = "policy"
"""The model's name in lists of models, and in answers to requests that name no model. Requests may name any model."""
AGENT_HEADER, TRAINED_HEADER = "x-verbatim-agent", "x-verbatim-trained"
"""Headers of a request: the agent's name, and whether the turn is trained ("false" for a turn that is context only)."""
_TRAINED = {"true": True, "1": True, "false": False, "0": False}
THREAD_HEADERS = (
    "thread-id",  # Codex: one id per agent, including the first
    "x-claude-code-agent-id",  # Claude Code: one id per sub-agent
)
"""Headers in which clients send ids of their agents. The ids are random for each episode, so they cannot serve as
names."""
_LONGEST_KEPT = 200

Replies: TypeAlias = list[ChatReply]


@dataclass(frozen=True, kw_only=True)
class Sender:
    """What a request's headers say about its sender."""

    agent: str
    """The agent's name, or "" if the headers have none."""
    thread: str
    """The client's identifier of the agent or conversation, or "" if the headers have none."""
    trained: bool
    """False if the turn's tokens are to be context only."""


def sender_of(headers: Mapping[str, str]) -> Sender:
    """Read the sender from a request's headers.

    >>> sender_of({"x-verbatim-agent": "critic", "thread-id": "01a2"})
    Sender(agent='critic', thread='thread-id 01a2', trained=True)

    Raises:
        Refused: X-Verbatim-Trained is neither "true" nor "false", or the agent's name is too long.
    """
    trained = headers.get(TRAINED_HEADER, "true").strip().lower()
    if trained not in _TRAINED:
        raise Refused(400, f'the header X-Verbatim-Trained is {trained!r:.80}; expected "true" or "false"')
    agent = headers.get(AGENT_HEADER, "")
    if len(agent) > LONGEST_NAME:
        raise Refused(
            400, f"the header X-Verbatim-Agent has {len(agent):,} characters; expected at most {LONGEST_NAME}"
        )
    threads = (f"{name} {headers[name]}" for name in THREAD_HEADERS if headers.get(name))
    return Sender(agent=agent, thread=_short(next(threads, "")), trained=_TRAINED[trained])


def _short(text: str) -> str:
    """Replace a long string by its digest. The string is only compared with other strings, and a client could send a
    very long string."""
    if len(text) <= _LONGEST_KEPT:
        return text
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def sent_before(headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return a request's idempotency key, and True if the headers mark the request as a retry. The SDKs of OpenAI and
    Anthropic send the key and the mark."""
    return _short(headers.get("idempotency-key", "")), headers.get("x-stainless-retry-count", "0") not in ("", "0")


def digest_of(body: bytes | bytearray, *about: object) -> bytes:
    """Compute the digest of everything on which the answer depends."""
    head = "".join(f"{part}\0" for part in about).encode(errors="surrogateescape")
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(body)
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class ReadChat:
    """A chat request after parsing. Its body has been freed."""

    asked: ChatRequest
    given: Mapping[str, object]
    """The JSON of the request's body."""
    sender: Sender
    digest: bytes
    """Digest of everything on which the answer depends."""


async def read_chat(session: Session, request: Request, body: bytearray, protocol: ChatProtocol) -> ReadChat:
    """Parse the body of a chat request; a large body is parsed on a thread.

    Raises:
        UsageError: the body is not a JSON object, or has too many values.
        Refused: a field is invalid or cannot be honoured, or the text is too long for the session's context.
    """
    headers = headers_of(request)
    room = min(session.loop.limits.max_context, session.loop.sampler.context_length)

    def read() -> ReadChat:
        given = read_json(body)
        asked = protocol.read(given, headers)
        sender = sender_of(headers)
        if max(text_of_all(asked.messages), text_of_all(asked.tools)) > most_text(room):
            raise session.too_long()
        return ReadChat(asked=asked, given=given, sender=sender, digest=digest_of(body, protocol.name, sender))

    try:
        return await asyncio.to_thread(read) if len(body) > LARGE else read()
    except Refused as refusal:
        if refusal.counted_as:
            session.counts[f"refused/{refusal.counted_as}"] += 1
        raise


async def answer_chat(session: Session, request: Request, chat: ReadChat, reply: ResponseWriter) -> None:
    """Answer a chat request.

    Args:
        session: Samples and records the turn.
        request: The HTTP request, whose headers are read.
        chat: The parsed body.
        reply: Writes the answer.

    Raises:
        ConnectionError: the client disconnected while the answer was being written.
        Exception: `Session.answer` raised it.
    """
    asked, given, sender, protocol = chat.asked, chat.given, chat.sender, reply.protocol
    key, is_retry = sent_before(headers_of(request))

    async def work(progress: AnswerProgress) -> Replies:
        return await session.answer(
            asked, agent=sender.agent, thread=sender.thread, trained=sender.trained, body=given, progress=progress
        )

    async def read(ids: Int32, prompt_ids: Int32) -> tuple[str, str]:
        return partial_texts(ids, asked, session.loop.renderer, prompt_ids)

    stamp = Stamp(created=int(time.time()), model=asked.model or MODEL)
    exchange = await session.exchanges.open(
        work, chat.digest, key=key, is_retry=is_retry, progress=AnswerProgress(stamp, asked.n)
    )
    progress = exchange.progress
    with session.exchanges.attend(exchange):
        if asked.stream:
            stream = protocol.stream(asked, progress.stamp)
            events = progress.events(stream, exchange.task, read, lambda: session.exchanges.wait(exchange))
            await reply.stream(stream, events)
            # Marked before `end`, because a client may disconnect as soon as it has the last event. By then it has the
            # whole answer.
            session.delivered(exchange)
            await reply.end()
        else:
            replies = await session.exchanges.wait(exchange)
            await reply.whole(200, protocol.answer(asked, replies, progress.stamp))
            session.delivered(exchange)
