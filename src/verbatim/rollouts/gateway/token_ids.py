"""Answers requests in token ids, in vLLM's format, for clients that render prompts themselves."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from verbatim.core.sampling import MOST_STOP_IDS
from verbatim.inference.chat.fields import read_text
from verbatim.inference.chat.protocol import Stamp
from verbatim.inference.http.completions import completion_body
from verbatim.inference.http.exchange import ResponseWriter
from verbatim.inference.http.json_size import LARGE, MOST_VALUES
from verbatim.inference.http.protocol import GENERATE, OURS, LogprobStyle
from verbatim.inference.http.request_body import read_json, read_request
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.rollouts.gateway.chat import MODEL, Sender, digest_of, sender_of, sent_before
from verbatim.rollouts.gateway.delivery import AnswerProgress
from verbatim.rollouts.gateway.session import Session
from verbatim.rollouts.gateway.wire import headers_of

ROUTE = GENERATE.strip("/")
"""The route for requests in token ids, without the key."""


@dataclass(frozen=True, kw_only=True)
class ReadIds:
    """A request in token ids after parsing. Its body has been freed."""

    asked: SampleRequest
    logprobs: LogprobStyle
    request_id: str
    sender: Sender
    digest: bytes
    """Digest of everything on which the answer depends."""


async def read_ids(session: Session, request: Request, body: bytearray) -> ReadIds:
    """Parse the body of a request; a large body is parsed on a thread.

    Raises:
        UsageError: the body is not a JSON object, or has too many values.
        RecordError: the token ids are invalid; the message names the position.
        Refused: a field or a header is invalid or cannot be honoured.
    """
    loop, sender = session.loop, sender_of(headers_of(request))
    room = loop.sampler.context_length

    def read() -> ReadIds:
        given = read_json(body, MOST_VALUES + room + MOST_STOP_IDS)
        asked, logprobs = read_request(given, seed=0, room=room, end_ids=loop.params.stop_token_ids)
        return ReadIds(
            asked=asked,
            logprobs=logprobs,
            request_id=read_text(given, "request_id") or secrets.token_hex(16),
            sender=sender,
            digest=digest_of(body, GENERATE, sender),
        )

    return await asyncio.to_thread(read) if len(body) > LARGE else read()


async def answer_ids(session: Session, request: Request, ids: ReadIds, reply: ResponseWriter) -> None:
    """Sample and record a turn whose prompt is given as ids.

    Args:
        session: Samples and records the turn.
        request: The HTTP request, whose headers are read.
        ids: The parsed body.
        reply: Writes the answer.

    Raises:
        ConnectionError: the client disconnected while the answer was being written.
        Refused: no turns are left, or the prompt leaves no room in the context.
        Exception: `Session.complete` raised it.
    """
    key, is_retry = sent_before(headers_of(request))
    asked, sender = ids.asked, ids.sender

    async def work(progress: AnswerProgress) -> Completion:
        return await session.complete(asked, agent=sender.agent, trained=sender.trained, progress=progress)

    exchange = await session.exchanges.open(
        work, ids.digest, key=key, is_retry=is_retry, progress=AnswerProgress(Stamp())
    )
    with session.exchanges.attend(exchange):
        completion: Completion = await session.exchanges.wait(exchange)
        found: dict[str, Any] = completion_body(
            completion,
            request_id=ids.request_id,
            model=MODEL,
            seed=0,
            num_prompt_tokens=len(asked.prompt_ids),
            policy_version=session.loop.sampler.policy_version,
            logprobs=ids.logprobs,
        )
        del found[OURS]["seed"]  # the request's seed was ignored for the episode's own, so none is reported
        await reply.whole(200, found)
        session.delivered(exchange)
