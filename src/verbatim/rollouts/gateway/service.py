"""The gateway's HTTP service: finds the session of a request by its key, and answers in the protocol of its route."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import RolloutError, UsageError, VerbatimError
from verbatim.core.texts import cut
from verbatim.inference.chat.protocol import ChatProtocol, Options, ProtocolRefusal
from verbatim.inference.chat.protocols import COUNT, ChatProtocols, model_card, model_list
from verbatim.inference.elsewhere import key_of
from verbatim.inference.http.limits import DOOR, ConnectionLimits
from verbatim.inference.http.server import listen
from verbatim.rollouts.gateway.budget import ByteBudget
from verbatim.rollouts.gateway.session import Session
from verbatim.rollouts.gateway.session_settings import SessionRefusal
from verbatim.rollouts.rewards import read_agent_scores

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.types import Receive, Scope, Send

    from verbatim.inference.http.acceptor import Acceptor
    from verbatim.inference.http.connections import Server
    from verbatim.inference.http.doors import ConnectionTable, Door
    from verbatim.inference.http.exchange import ClientGone, StopEvent, read_whole, while_there
    from verbatim.inference.http.request_body import Refused
    from verbatim.rollouts.gateway.chat import MODEL, answer_chat, read_chat
    from verbatim.rollouts.gateway.token_ids import ROUTE, answer_ids, read_ids
    from verbatim.rollouts.gateway.wire import Reply, read_body, told
except ImportError as error:
    raise UsageError(f"the gateway needs {error.name}: pip install 'verbatim-rl[gateway]'") from None

SESSION_HEADER = "x-session-id"
"""The header that tells sessions of one key apart."""

_SMALL = 2**16
"""Values of the body of a request that is no conversation."""
_GRACE = 1.0
"""Seconds for answers to be written when the service stops."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits(ConnectionLimits):
    """Limits of a gateway and of what each session and each program takes of it."""

    max_connections: int = 32_768
    """Most open connections, and never more than there are descriptors for."""
    takes_chunks: bool = True
    max_body: int = 32 * 2**20
    """Bytes of a body."""
    session_bytes: int = 64 * 2**20
    """Bytes of the bodies of one session that arrive at a time."""
    all_bytes: int = 512 * 2**20
    """Bytes of all bodies that arrive at a time; more wait."""
    program_connections: int = 512
    """Connections of one program in its sandbox, with all that it plays."""
    program_requests: float = 500.0
    """Connections, and requests, in a second of one program in its sandbox, in the long run; more wait."""

    def __post_init__(self) -> None:
        if not 0 < self.max_body <= self.session_bytes <= self.all_bytes:
            raise UsageError(
                f"max_body = {self.max_body}, session_bytes = {self.session_bytes}, all_bytes = "
                f"{self.all_bytes}; expected each at least as large as the one before"
            )


@dataclass(eq=False)
class Body:
    """A request's body, which counts among those of its session until the end of the block that reads it."""

    data: bytearray
    held: contextlib.AsyncExitStack

    async def __aenter__(self) -> bytearray:
        data, self.data = self.data, bytearray()
        return data

    async def __aexit__(self, *about: object) -> None:
        await self.held.aclose()


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
        self._server: Server | None = None
        self._doors: dict[Acceptor, Door] = {}
        self._stopped = StopEvent()
        self._budget = ByteBudget(self.limits.session_bytes, self.limits.all_bytes)
        self._chats = ChatProtocols(self.options)

    async def start(self) -> None:
        """Listen; a UsageError if the address is taken or not of this machine."""
        most = min(self.limits.max_connections, raise_descriptor_limit())
        listening = listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        self._table = ConnectionTable(self.limits, most)
        self._server = Server(self, self._table)
        self._listening = listening
        self._server.listen_on(listening)

    def open_door(self, listening: socket.socket) -> Acceptor:
        """Serve another socket too, for a program that is limited by itself, until `close_door`."""
        assert self._server is not None, "the service has not been started"
        door = Door(
            f"door {listening.fileno()} {secrets.token_hex(4)}",
            self.limits.program_connections,
            self.limits.program_requests,
        )
        acceptor = self._server.listen_on(listening, door)
        self._doors[acceptor] = door
        return acceptor

    def close_door(self, acceptor: Acceptor) -> None:
        """Serve a socket no longer: its connections are closed, and it is too."""
        door = self._doors.pop(acceptor, None)
        if door is not None and self._server is not None:
            self._server.stop_listening(acceptor)
            self._table.close(door.name)
        acceptor.listening.close()

    async def close(self) -> None:
        """Stop listening; requests under way are cancelled."""
        server, self._server = self._server, None
        if server is not None:
            self._stopped.set()
            await server.stop(_GRACE)
            for listening in (self._listening, *(acceptor.listening for acceptor in self._doors)):
                listening.close()
            self._doors.clear()

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        door = scope.get("state", {}).get(DOOR)
        if door is not None and (delay := door.requests.delay()):
            await asyncio.sleep(delay)
        request, reply = Request(scope, receive), Reply(scope, send)
        key, route = _split(request)
        protocol = self._protocol(request, route)
        try:
            await self._answer(request, key, route, reply)
        except (ConnectionError, ClientDisconnect, ClientGone):  # it may ask again
            pass
        except (SessionRefusal, Refused) as refusal:
            with contextlib.suppress(ConnectionError):
                if not reply.has_begun:
                    await reply.error(protocol, refusal.status, refusal.message, getattr(refusal, "kind", ""))
        except Exception as error:  # noqa: BLE001  a mistake of ours, which is logged and answered as one
            with contextlib.suppress(ConnectionError):
                await reply.error(protocol, *told(error))
        if reply.has_begun and not reply.has_ended:  # a stream that the end of the service cut off
            with contextlib.suppress(ConnectionError):
                await reply.end()

    async def _answer(self, request: Request, key: str | None, route: str, reply: Reply) -> None:
        if route in ("", "health") and key is None:
            await reply.whole(200, {"status": "ok"})
            return
        entry = self._found(key)
        if entry is None:
            raise SessionRefusal(
                401, "expected the key of a session that is not over, as a bearer token, as x-api-key, or in the path"
            )
        if request.method == "GET" and (route == "models" or route.startswith("models/")):
            await reply.whole(200, _models(entry, route.removeprefix("models").removeprefix("/")))
            return
        name = request.headers.get(SESSION_HEADER, "")
        session = entry.session or entry.members.get(name)
        if session is None:
            raise SessionRefusal(404, f"there is no session {name!r:.80} under this key, or it is over")
        posts = (*self._chats.by_route, ROUTE, "reward")
        if request.method != "POST" or route not in posts:
            known = ", ".join(("GET /v1/models", *(f"POST /v1/{name}" for name in posts)))
            raise SessionRefusal(404, f"there is no {request.method} {cut(request.url.path, 200)}; there are {known}")
        if route == "reward":
            await self._reward(session, request, reply)
            return
        arrived = await self._body(session, request, "token_counts" if route == COUNT else "requests")
        if route == COUNT:
            work = self._count_tokens(session, request, arrived, reply)
        elif route == ROUTE:
            work = self._token_ids(session, request, arrived, reply)
        else:
            work = self._chat(session, request, arrived, reply, self._chats.of(route))
        try:
            await while_there(request.receive, self._stopped, work)
        finally:
            await arrived.held.aclose()  # also where the work never began

    async def _body(self, session: Session, request: Request, kind: str | None) -> Body:
        """A request's body; a SessionRefusal of one that its session does not take, before it is read."""
        if session.over:
            raise SessionRefusal(410, "this session is over", "session_over")
        limits = self.limits
        size = int(request.headers.get("content-length", 0))  # h11 has checked that it is a number
        async with contextlib.AsyncExitStack() as stack:
            with session.arriving(kind) if kind is not None else contextlib.nullcontext():
                if size > limits.max_body:
                    raise SessionRefusal(413, f"the request is larger than {limits.max_body} bytes")
                grow = await stack.enter_async_context(self._budget.hold(session, size, limits.body_seconds))
                data = await read_whole(request, limits.max_body, limits, grow)
            return Body(data, stack.pop_all())

    def _protocol(self, request: Request, route: str) -> ChatProtocol:
        """The protocol that a client of this route reads errors in."""
        is_other = route not in self._chats.by_route and "anthropic-version" in request.headers
        return self._chats.of("messages" if is_other else route)

    def _found(self, key: str | None) -> _Entry | None:
        """What a key opens; its secret part is compared in constant time."""
        parts = (key or "").split("-", 2)
        entry = self._entries.get(parts[1]) if len(parts) == 3 and parts[0] == "vb" else None
        secret = entry.secret if entry is not None else secrets.token_urlsafe(24)
        is_right = hmac.compare_digest(parts[-1].encode(), secret.encode())
        return entry if entry is not None and is_right else None

    async def _reward(self, session: Session, request: Request, reply: Reply) -> None:
        """Take the episode's reward: `{"reward": 1.0}`, or `{"reward": {part: number}}`."""
        async with await self._body(session, request, None) as body:
            given = read_body(body, _SMALL)
        reward = given.get("reward") if isinstance(given, dict) else None
        try:
            if reward is None or reward == {} or isinstance(reward, bool):
                raise RolloutError(
                    f'found {given!r:.80}, expected {{"reward": number}} or {{"reward": {{part: number}}}}'
                )
            read_agent_scores(reward, "POST /reward")
        except RolloutError as error:
            raise SessionRefusal(400, str(error)) from None
        session.reward = reward
        await reply.whole(200, {"reward": reward})

    async def _count_tokens(self, session: Session, request: Request, arrived: Body, reply: Reply) -> None:
        """Count the tokens of a prompt that is not sent, as Anthropic's clients ask."""
        session.admit("token_counts")
        async with arrived as body:
            chat = await read_chat(session, request, body, self._chats.anthropic, is_count=True)
        if isinstance(chat, ProtocolRefusal):
            await reply.whole(chat.status, chat.body)
            return
        try:
            await reply.whole(200, self._chats.anthropic.count(await session.count_tokens(chat.asked)))
        except VerbatimError as error:
            status, message, kind = told(error)
            await reply.error(self._chats.anthropic, status, message, kind)

    async def _token_ids(self, session: Session, request: Request, arrived: Body, reply: Reply) -> None:
        session.admit()
        async with arrived as body:
            asked = await read_ids(session, request, body)
        await answer_ids(session, request, asked, self._chats.of("chat/completions"), reply)

    async def _chat(
        self, session: Session, request: Request, arrived: Body, reply: Reply, protocol: ChatProtocol
    ) -> None:
        session.admit()
        async with arrived as body:
            chat = await read_chat(session, request, body, protocol)
        if isinstance(chat, ProtocolRefusal):
            await reply.whole(chat.status, chat.body)
        else:
            await answer_chat(session, request, chat, protocol, reply)


def _split(request: Request) -> tuple[str | None, str]:
    """The key of a request, and its route: `/s/KEY/v1/models` is (KEY, "models"); without a key in the path it is that
    of the headers."""
    parts = [part for part in request.url.path.split("/") if part]
    key: str | None = None
    if len(parts) >= 2 and parts[0] == "s":
        key, parts = parts[1], parts[2:]
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    if key is None:
        given = key_of(request.headers.raw, b"x-api-key", b"api-key")
        key = None if given is None else given.decode("latin-1")
    return key, "/".join(parts)


def _models(entry: _Entry, name: str) -> dict[str, Any]:
    """A model's card, or the list of one card where no name is given."""
    card = model_card(name or MODEL, entry.context_length)
    return card if name else model_list(card)
