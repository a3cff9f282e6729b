"""The gateway's HTTP service: finds the session of a request by its key, and answers in the protocol of its route."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from verbatim.errors import EngineDead, RolloutError, SamplerFault, TemplateFault, UsageError, VerbatimError
from verbatim.gateway.exchanges import Ended, OtherRequest
from verbatim.gateway.session import Answered, Session, SessionRefusal, num_prompt_tokens
from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses
from verbatim.inference.chat.protocol import ChatProtocol, ChatRequest, Options, ProtocolRefusal, Stamp
from verbatim.inference.http.server import listen
from verbatim.rollouts.rewards import read_agent_scores
from verbatim.texts import cut, error_text

try:
    import orjson
    from aiohttp import web
except ImportError as error:
    raise UsageError(f"the gateway needs {error.name}: pip install 'verbatim-rl[gateway]'") from None

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The model's name, for requests that name none and for lists of models; a request may name any."""
AGENT_HEADER, TRAINED_HEADER = "x-verbatim-agent", "x-verbatim-trained"
"""The headers for an agent's name, and for "false" where a turn is context only."""
_QUIET_SECONDS = 10.0
"""Seconds after which a stream is sent something, so that it does not look dead."""
_LONGEST_MESSAGE = 2000

Handler = Callable[[Session, web.Request, bytes], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits of one request."""

    max_body: int = 64 * 2**20
    """Bytes of a body."""
    body_seconds: float = 60.0
    """Seconds for the body to arrive."""


@dataclass(eq=False)
class _Entry:
    secret: str
    session: Session


@dataclass(eq=False)
class Service:
    """Serves sessions over HTTP, in the caller's event loop."""

    host: str = "127.0.0.1"
    port: int = 0
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    options: Options = field(default_factory=Options)
    """Fields of requests that are let pass without effect."""

    def __post_init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._runner: web.AppRunner | None = None
        self._anthropic = AnthropicMessages(self.options)
        self._chats: Mapping[str, ChatProtocol] = {
            "chat/completions": cast(ChatProtocol, OpenAIChat(self.options)),
            "responses": cast(ChatProtocol, OpenAIResponses(self.options)),
            "messages": cast(ChatProtocol, self._anthropic),
        }

    async def start(self) -> None:
        """Listen; a UsageError if the address is taken or not of this machine."""
        app = web.Application(client_max_size=self.limits.max_body)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        listening = listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        await self.listen_on(listening)

    async def listen_on(self, listening: socket.socket) -> web.SockSite:
        """Serve another socket too, until its site is stopped."""
        assert self._runner is not None, "the service has not been started"
        site = web.SockSite(self._runner, listening, backlog=1024)
        await site.start()
        return site

    async def close(self) -> None:
        """Stop listening; requests under way are cancelled."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        """The address, without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def open(self, session: Session) -> str:
        """Serve a session; returns its key."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        self._entries[name] = _Entry(secret, session)
        return f"vb-{name}-{secret}"

    def forget(self, key: str) -> None:
        """Serve the session of this key no longer."""
        self._entries.pop(key.split("-", 2)[1], None)

    # ---- requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key, route = _split(request)
        chat = self._protocol(request, route)
        if route in ("", "health") and key is None:
            return _json(200, {"status": "ok"})
        session = self._session(key)
        if session is None:
            return _error(chat, 401, "expected the key of a session that is not over, as a bearer token, as x-api-key, "
                          "or in the path")  # fmt: skip
        handlers: dict[tuple[str, str], Handler] = {
            ("POST", "reward"): self._reward, ("GET", "models"): self._models,
            ("POST", "messages/count_tokens"): self._count_tokens,
            **{("POST", name): self._chat for name in self._chats},
        }  # fmt: skip
        handler = handlers.get((request.method, route))
        if request.method == "GET" and route.startswith("models/"):
            return _json(200, _card(session, route.removeprefix("models/")))
        if handler is None:
            known = ", ".join(f"{method} /v1/{name}" for method, name in handlers)
            return _error(chat, 404, f"there is no {request.method} {cut(request.path, 200)}; there are {known}")
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                body = await request.read()
        except TimeoutError:
            return _error(chat, 408, f"the body did not arrive within {self.limits.body_seconds:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _error(chat, 413, f"the request is larger than {self.limits.max_body} bytes")
        try:
            return await handler(session, request, body)
        except ConnectionError:  # the client went while its answer was written; it may ask again
            return web.Response(status=499)
        except SessionRefusal as refusal:
            return _error(chat, refusal.status, str(refusal), refusal.kind)

    def _protocol(self, request: web.Request, route: str) -> ChatProtocol:
        """The protocol that a client of this route reads errors in."""
        is_anthropic = route.startswith("messages") or "anthropic-version" in request.headers
        return self._chats.get(route) or self._chats["messages" if is_anthropic else "chat/completions"]

    def _session(self, key: str | None) -> Session | None:
        """The session of a key; the secret part of a key is compared in constant time."""
        parts = (key or "").split("-", 2)
        entry = self._entries.get(parts[1]) if len(parts) == 3 and parts[0] == "vb" else None
        secret = entry.secret if entry is not None else secrets.token_urlsafe(24)
        is_right = hmac.compare_digest(parts[-1].encode(errors="surrogateescape"), secret.encode())
        return entry.session if entry is not None and is_right else None

    async def _models(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        return _json(200, {"object": "list", "data": [_card(session, MODEL)], "has_more": False, "first_id": MODEL,
                           "last_id": MODEL})  # fmt: skip

    async def _reward(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        """Take the episode's reward: `{"reward": 1.0}`, or `{"reward": {part: number}}`."""
        given = _parsed(body)
        reward = given.get("reward") if isinstance(given, dict) else None
        try:
            if reward is None or isinstance(reward, bool):
                raise RolloutError(f"found {given!r:.80}, expected "
                                   '{"reward": number} or {"reward": {part: number}}')  # fmt: skip
            read_agent_scores(reward, "POST /reward")
        except RolloutError as error:
            return _error(self._chats["chat/completions"], 400, str(error))
        session.reward = reward
        return _json(200, {"reward": reward})

    async def _count_tokens(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        """Count the tokens of a prompt that is not sent, as Anthropic's clients ask."""
        try:
            asked = self._anthropic.read_count(_object(body), _headers(request))
            return _json(200, self._anthropic.count(num_prompt_tokens(session, asked)))
        except ProtocolRefusal as refusal:
            return _json(refusal.status, refusal.body)
        except VerbatimError as error:
            status, message, kind = _told(error)
            return _json(status, self._anthropic.error(status, message, kind=kind))

    async def _chat(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        _, route = _split(request)
        protocol = self._chats[route]
        headers = _headers(request)
        session.admit()
        given = _object(body)
        try:
            asked = protocol.read(given, headers)
        except ProtocolRefusal as refusal:
            session.counts[f"refused/{refusal.field or 'request'}"] += 1
            return _json(refusal.status, refusal.body)
        return await self._answer(session, request, protocol, asked, headers, body, given)

    async def _answer(
        self, session: Session, request: web.Request, protocol: ChatProtocol, asked: ChatRequest,
        headers: Mapping[str, str], body: bytes, given: Mapping[str, Any],
    ) -> web.StreamResponse:  # fmt: skip
        agent = headers.get(AGENT_HEADER, "")[:200]
        trained = headers.get(TRAINED_HEADER, "").lower() not in ("false", "0")

        async def work() -> Answered:
            replies = await session.answer(asked, agent=agent, trained=trained, body=given)
            return Answered(replies=replies, stamp=Stamp(created=int(time.time()), model=asked.model or MODEL))

        head = f"{protocol.name}\0{agent}\0{trained}\0".encode(errors="surrogateescape")
        digest = hashlib.blake2b(head + body, digest_size=16).digest()
        streamed: web.StreamResponse | None = None
        writer = protocol.stream(asked, Stamp())
        try:
            exchange = session.exchanges.open(
                work, digest, key=headers.get("idempotency-key", "")[:200],
                is_retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
            )  # fmt: skip
            while True:
                try:
                    answered = await session.exchanges.wait(exchange, _QUIET_SECONDS if asked.stream else None)
                    break
                except TimeoutError:
                    if exchange.task.done() and not exchange.is_usable:
                        raise  # the sampler's own; a wait that is over finds the task at work
                    streamed = streamed or await _begin(request)
                    await streamed.write(writer.ping())
        except Exception as error:  # noqa: BLE001  answered as what it is, and logged where it is a mistake of ours
            status, message, kind = _told(error)
            if streamed is None:
                return _error(protocol, status, message, kind)
            await streamed.write(writer.error(status, message))
            await streamed.write_eof()
            return streamed
        if not asked.stream:
            answer = _json(200, protocol.answer(asked, answered.replies, answered.stamp))
            await answer.prepare(request)
            await answer.write_eof()
            exchange.delivered = True
            return answer
        writer = protocol.stream(asked, answered.stamp)
        streamed = streamed or await _begin(request)
        await streamed.write(writer.begin(answered.replies[0].num_prompt_tokens))
        await streamed.write(writer.end(answered.replies))
        await streamed.write_eof()
        exchange.delivered = True
        return streamed


def _split(request: web.Request) -> tuple[str | None, str]:
    """The key of a request, and its route: `/s/KEY/v1/models` is (KEY, "models"); without a key in the path it is that
    of the headers."""
    parts = [part for part in request.path.split("/") if part]
    key: str | None = None
    if len(parts) >= 2 and parts[0] == "s":
        key, parts = parts[1], parts[2:]
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    if key is None:
        headers = request.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else None
        key = key or headers.get("x-api-key") or headers.get("api-key")
    return key, "/".join(parts)


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SessionRefusal(400, f"the body is no JSON: {error}") from None


def _object(body: bytes) -> dict[str, Any]:
    given = _parsed(body)
    if not isinstance(given, dict):
        raise SessionRefusal(400, "expected a JSON object as the body")
    return given


def _headers(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _card(session: Session, name: str) -> dict[str, Any]:
    limits, sampler = session.loop.limits, session.loop.sampler
    return {"id": name, "object": "model", "type": "model", "display_name": name, "created": 0,
            "created_at": "1970-01-01T00:00:00Z", "owned_by": "verbatim",
            "max_model_len": min(limits.max_context, sampler.context_length)}  # fmt: skip


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


def _told(error: Exception) -> tuple[int, str, str]:
    """Status, message and code of an error."""
    if isinstance(error, SessionRefusal):
        return error.status, str(error), error.kind
    if isinstance(error, OtherRequest):
        return 422, "this idempotency key came with another request before", "idempotency_key_reused"
    if isinstance(error, Ended):
        return 503, "the session is over", "session_over"
    if isinstance(error, (SamplerFault, EngineDead)):
        return 500, f"the sampler failed: {error}", "sampler_failed"
    if isinstance(error, (UsageError, RolloutError, TemplateFault)):
        return 400, cut(str(error), _LONGEST_MESSAGE), ""
    logger.error("a request to the gateway failed", exc_info=error)
    return 500, f"the gateway failed: {error_text(error, 200)}", "gateway_failed"


def _error(protocol: ChatProtocol, status: int, message: str, kind: str = "") -> web.Response:
    return _json(status, protocol.error(status, message, kind=kind))


def _json(status: int, body: Mapping[str, Any]) -> web.Response:
    """In ASCII: texts may hold lone surrogates."""
    return web.Response(status=status, body=json.dumps(body).encode("ascii"), content_type="application/json")

