"""Answers requests in token ids: for clients that render by themselves, in vLLM's form."""

from __future__ import annotations

import secrets
from typing import Any

from aiohttp import web

from verbatim.gateway.chat import MODEL, digest_of, sender_of, sent_before
from verbatim.gateway.progress import Progress
from verbatim.gateway.session import Session
from verbatim.gateway.session_settings import SessionRefusal
from verbatim.gateway.wire import error_response, headers_of, json_response, read_object, told
from verbatim.inference.base import Completion
from verbatim.inference.chat.protocol import ChatProtocol, Stamp
from verbatim.inference.http.protocol import GENERATE, OURS, completion_body
from verbatim.inference.http.request_body import read_name, read_request

ROUTE = GENERATE.strip("/")
"""The route, behind the key."""


async def answer_ids(session: Session, request: web.Request, body: bytes, protocol: ChatProtocol) -> web.StreamResponse:
    """Sample and record a turn whose prompt is given as ids.

    Args:
        session: Samples and records.
        request: The connection.
        body: The request's.
        protocol: Errors are written in its form.

    Raises:
        SessionRefusal: the session is over or has too many requests, or the body is no JSON object.
    """
    session.admit()
    headers = headers_of(request)
    sender = sender_of(headers)
    key, is_retry = sent_before(headers)
    loop = session.loop
    try:
        given = read_object(body)
        request_id = read_name(given, "request_id") or secrets.token_hex(16)
        asked, logprobs = read_request(
            given, seed=0, room=loop.sampler.context_length, end_ids=loop.params.stop_token_ids
        )

        async def work(progress: Progress) -> Completion:
            return await session.complete(asked, agent=sender.agent, trained=sender.trained)

        exchange = await session.exchanges.open(
            work, digest_of(body, GENERATE, sender), key=key, is_retry=is_retry, progress=Progress(Stamp())
        )
        with session.exchanges.attend(exchange):
            completion: Completion = await session.exchanges.wait(exchange)
            found: dict[str, Any] = completion_body(
                completion,
                request_id=request_id,
                model=MODEL,
                seed=0,
                num_prompt_tokens=len(asked.prompt_ids),
                policy_version=loop.sampler.policy_version,
                logprobs=logprobs,
            )
            del found[OURS]["seed"]  # the episode's own, whatever was asked for
            answer = json_response(200, found)
            await answer.prepare(request)
            await answer.write_eof()
            exchange.delivered = True
            return answer
    except (ConnectionError, SessionRefusal):
        raise
    except Exception as error:  # noqa: BLE001  answered as what it is
        return error_response(protocol, *told(error))
