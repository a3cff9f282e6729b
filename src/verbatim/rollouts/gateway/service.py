"""The gateway's HTTP service: finds the session of a request by its key, and answers in the protocol of its route."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from verbatim.errors import RolloutError, UsageError, VerbatimError
from verbatim.gateway.session import Session
from verbatim.gateway.session_settings import SessionRefusal
from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses
from verbatim.inference.chat.protocol import ChatProtocol, Options, ProtocolRefusal
from verbatim.inference.http.server import listen
from verbatim.rollouts.rewards import read_agent_scores
from verbatim.texts import cut

try:
    from aiohttp import web

    from verbatim.gateway.chat import MODEL, answer_chat
    from verbatim.gateway.token_ids import ROUTE, answer_ids
    from verbatim.gateway.wire import error_response, headers_of, json_response, read_body, read_object, told
except ImportError as error:
    raise UsageError(f"the gateway needs {error.name}: pip install 'verbatim-rl[gateway]'") from None

SESSION_HEADER = "x-session-id"
"""The header that tells sessions of one key apart."""

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
    """What a key opens."""

    secret: str
    session: Session | None = None
    """The session of the key alone."""
    members: dict[str, Session] = field(default_factory=dict)
    """Sessions of the key and a name."""
    context_length: int = 0


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
        sampler = session.loop.sampler
        return self._open(session, min(session.loop.limits.max_context, sampler.context_length))

    def open_group(self, context_length: int) -> str:
        """Serve sessions with one key, told apart by `SESSION_HEADER`: for a client that keeps one connection for many
        episodes. Returns the key.

        Args:
            context_length: What the list of models says.
        """
        return self._open(None, context_length)

    def join(self, key: str, name: str, session: Session) -> None:
        """Serve a session of a group."""
        self._entry(key).members[name] = session

    def leave(self, key: str, name: str) -> None:
        """Serve a session of a group no longer."""
        self._entry(key).members.pop(name, None)

    def _open(self, session: Session | None, context_length: int) -> str:
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        self._entries[name] = _Entry(secret, session, context_length=context_length)
        return f"vb-{name}-{secret}"

    def _entry(self, key: str) -> _Entry:
        return self._entries[key.split("-", 2)[1]]

    def forget(self, key: str) -> None:
        """Serve the session of this key no longer."""
        self._entries.pop(key.split("-", 2)[1], None)

    # ---- requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key, route = _split(request)
        chat = self._protocol(request, route)
        if route in ("", "health") and key is None:
            return json_response(200, {"status": "ok"})
        entry = self._found(key)
        if entry is None:
            return error_response(
                chat,
                401,
                "expected the key of a session that is not over, as a bearer token, as x-api-key, or in the path",
            )
        if request.method == "GET" and (route == "models" or route.startswith("models/")):
            return json_response(200, _models(entry, route.removeprefix("models").removeprefix("/")))
        name = request.headers.get(SESSION_HEADER, "")
        session = entry.session or entry.members.get(name)
        if session is None:
            return error_response(chat, 404, f"there is no session {name!r:.80} under this key, or it is over")
        handlers = self._handlers()
        handler = handlers.get((request.method, route))
        if handler is None:
            known = ", ".join(f"{method} /v1/{name}" for method, name in (("GET", "models"), *handlers))
            return error_response(
                chat, 404, f"there is no {request.method} {cut(request.path, 200)}; there are {known}"
            )
        try:
            return await handler(session, request, await self._body(session, request, route))
        except ConnectionError:  # the client went while its answer was written; it may ask again
            return web.Response(status=499)
        except SessionRefusal as refusal:
            return error_response(chat, refusal.status, str(refusal), refusal.kind)

    async def _body(self, session: Session, request: web.Request, route: str) -> bytes:
        """A request's body; a SessionRefusal of one that its session does not take, before it is read."""
        if session.over:
            raise SessionRefusal(410, "this session is over", "session_over")
        kind = {"reward": None, "messages/count_tokens": "token_counts"}.get(route, "requests")
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                with session.arriving(kind) if kind is not None else contextlib.nullcontext():
                    return await request.read()
        except TimeoutError:
            seconds = f"{self.limits.body_seconds:g} s"
            raise SessionRefusal(408, f"the body did not arrive within {seconds}") from None
        except web.HTTPRequestEntityTooLarge:
            raise SessionRefusal(413, f"the request is larger than {self.limits.max_body} bytes") from None

    def _handlers(self) -> Mapping[tuple[str, str], Handler]:
        return {
            **{("POST", name): self._chat for name in self._chats},
            ("POST", "messages/count_tokens"): self._count_tokens,
            ("POST", ROUTE): self._token_ids,
            ("POST", "reward"): self._reward,
        }

    def _protocol(self, request: web.Request, route: str) -> ChatProtocol:
        """The protocol that a client of this route reads errors in."""
        is_anthropic = route.startswith("messages") or "anthropic-version" in request.headers
        return self._chats.get(route) or self._chats["messages" if is_anthropic else "chat/completions"]

    def _found(self, key: str | None) -> _Entry | None:
        """What a key opens; its secret part is compared in constant time."""
        parts = (key or "").split("-", 2)
        entry = self._entries.get(parts[1]) if len(parts) == 3 and parts[0] == "vb" else None
        secret = entry.secret if entry is not None else secrets.token_urlsafe(24)
        is_right = hmac.compare_digest(parts[-1].encode(errors="surrogateescape"), secret.encode())
        return entry if entry is not None and is_right else None

    async def _reward(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        """Take the episode's reward: `{"reward": 1.0}`, or `{"reward": {part: number}}`."""
        given = read_body(body)
        reward = given.get("reward") if isinstance(given, dict) else None
        try:
            if reward is None or reward == {} or isinstance(reward, bool):
                raise RolloutError(
                    f'found {given!r:.80}, expected {{"reward": number}} or {{"reward": {{part: number}}}}'
                )
            read_agent_scores(reward, "POST /reward")
        except RolloutError as error:
            return error_response(self._chats["chat/completions"], 400, str(error))
        session.reward = reward
        return json_response(200, {"reward": reward})

    async def _count_tokens(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        """Count the tokens of a prompt that is not sent, as Anthropic's clients ask."""
        session.admit("token_counts")
        try:
            asked = self._anthropic.read_count(read_object(body), headers_of(request))
            return json_response(200, self._anthropic.count(await session.count_tokens(asked)))
        except ProtocolRefusal as refusal:
            return json_response(refusal.status, refusal.body)
        except VerbatimError as error:
            status, message, kind = told(error)
            return json_response(status, self._anthropic.error(status, message, kind=kind))

    async def _token_ids(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        return await answer_ids(session, request, body, self._chats["chat/completions"])

    async def _chat(self, session: Session, request: web.Request, body: bytes) -> web.StreamResponse:
        return await answer_chat(session, request, body, self._chats[_split(request)[1]])


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


def _models(entry: _Entry, name: str) -> dict[str, Any]:
    """A model's card, or the list of one card where no name is given."""
    card = {
        "id": name or MODEL,
        "object": "model",
        "type": "model",
        "display_name": name or MODEL,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "verbatim",
        "max_model_len": entry.context_length,
    }
    return card if name else {"object": "list", "data": [card], "has_more": False, "first_id": MODEL, "last_id": MODEL}
