"""The gateway's HTTP service: finds a request's session by the key, and answers in the protocol of the route."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import RolloutError, UsageError
from verbatim.core.texts import cut
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.protocol import Options
from verbatim.inference.chat.protocols import COUNT, ChatProtocols, model_card, model_list
from verbatim.inference.elsewhere import key_of
from verbatim.inference.http.json_text import read_value
from verbatim.inference.http.limits import DOOR, ConnectionLimits
from verbatim.inference.http.lone_surrogates import refuse_lone_surrogates
from verbatim.inference.http.refused import Refused
from verbatim.inference.http.server import listen
from verbatim.rollouts.gateway.budget import ByteBudget
from verbatim.rollouts.gateway.session import Session
from verbatim.rollouts.rewards import read_agent_scores

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.types import Receive, Scope, Send

    from verbatim.inference.http.acceptor import Acceptor
    from verbatim.inference.http.connections import Server
    from verbatim.inference.http.doors import ConnectionTable, Door
    from verbatim.inference.http.exchange import (
        ClientGone,
        ResponseWriter,
        StopEvent,
        check_head,
        read_whole,
        while_there,
    )
    from verbatim.rollouts.gateway.chat import MODEL, ReadChat, answer_chat, read_chat
    from verbatim.rollouts.gateway.token_ids import ROUTE, answer_ids, read_ids
    from verbatim.rollouts.gateway.wire import told
except ImportError as error:
    raise UsageError(f"the gateway needs {error.name}: pip install 'verbatim-rl[gateway]'") from None

SESSION_HEADER = "x-session-id"
"""The header whose value tells apart the sessions that share a key."""

_SMALL = 2**16
"""Maximum number of JSON values in the body of a request that does not contain a conversation."""
_GRACE = 1.0
"""Number of seconds that a stopping service waits for answers that are being written."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits(ConnectionLimits):
    """Limits of the whole gateway, of each session, and of each sandboxed program."""

    max_connections: int = 32_768
    """Maximum number of open connections, lowered to the number of available file descriptors."""
    takes_chunks: bool = True
    """True if chunked request bodies are accepted."""
    max_body: int = 32 * 2**20
    """Maximum size of a request body in bytes."""
    session_bytes: int = 64 * 2**20
    """Maximum size in bytes of all request bodies of one session that are in memory at the same time. A request that
    exceeds it is refused."""
    all_bytes: int = 512 * 2**20
    """Maximum size in bytes of all request bodies that are in memory at the same time. A request that exceeds it
    waits."""
    program_connections: int = 512
    """Maximum number of open connections of one sandboxed program, for all of its episodes together."""
    program_requests: float = 500.0
    """Maximum average rate, per second, of new connections and of requests of one sandboxed program. Connections and
    requests above this rate wait."""

    def __post_init__(self) -> None:
        if not 0 < self.max_body <= self.session_bytes <= self.all_bytes:
            raise UsageError(
                f"max_body = {self.max_body}, session_bytes = {self.session_bytes}, all_bytes = "
                f"{self.all_bytes}; expected each at least as large as the one before"
            )


@dataclass(eq=False)
class _Entry:
    """The session, or the group of sessions, that belongs to one key."""

    secret: str
    """The secret part of the key."""
    session: Session | None = None
    """The only session of the key, or None if the key belongs to a group."""
    members: dict[str, Session] = field(default_factory=dict)
    """The sessions of a group, keyed by their values of `SESSION_HEADER`."""
    context_length: int = 0


@dataclass(eq=False)
class Service:
    """Serves the sessions of episodes over HTTP, in the caller's event loop."""

    host: str = "127.0.0.1"
    port: int = 0
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    options: Options = field(default_factory=Options)
    """Request fields that are accepted but have no effect."""

    def __post_init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._server: Server | None = None
        self._doors: dict[Acceptor, Door] = {}
        self._stopped = StopEvent()
        self._budget = ByteBudget(self.limits.session_bytes, self.limits.all_bytes)
        self._chats = ChatProtocols(self.options)

    async def start(self) -> None:
        """Start listening. Raises UsageError if the address is in use or does not belong to this machine."""
        most = min(self.limits.max_connections, raise_descriptor_limit())
        listening = listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        self._table = ConnectionTable(self.limits, most)
        self._server = Server(self, self._table)
        self._listening = listening
        self._server.listen_on(listening)

    def open_door(self, listening: socket.socket) -> Acceptor:
        """Serve this additional socket until `close_door`. Its connections come from one program and have separate
        limits."""
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
        """Stop serving a socket of `open_door`; close the socket and its connections."""
        door = self._doors.pop(acceptor, None)
        if door is not None and self._server is not None:
            self._server.stop_listening(acceptor)
            self._table.close(door.name)
        acceptor.listening.close()

    async def close(self) -> None:
        """Stop listening, and cancel the requests in flight."""
        server, self._server = self._server, None
        if server is not None:
            self._stopped.set()
            await server.stop(_GRACE)
            for listening in (self._listening, *(acceptor.listening for acceptor in self._doors)):
                listening.close()
            self._doors.clear()

    def num_connections(self, door: Acceptor | None = None) -> int:
        """Return the number of open connections: of one socket from `open_door`, or of all sockets if `door` is
        None."""
        return len(self._table.open) if door is None else self._table.num_of(self._doors[door].name)

    @property
    def held_bytes(self) -> int:
        """Number of bytes of request bodies that are in memory."""
        return self._budget.held

    @property
    def url(self) -> str:
        """The service's URL without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def open(self, session: Session) -> str:
        """Start to serve a session; return the key for it."""
        sampler = session.loop.sampler
        return self._open(session, min(session.loop.limits.max_context, sampler.context_length))

    def open_group(self, context_length: int) -> str:
        """Create a key for a group of sessions, and return it. A group is for a client that uses one connection for
        many episodes: the header `SESSION_HEADER` tells the sessions apart.

        Args:
            context_length: The context length in tokens that the route `models` reports.
        """
        return self._open(None, context_length)

    def join(self, key: str, name: str, session: Session) -> None:
        """Add a session to the group of this key, under this name."""
        self._entry(key).members[name] = session

    def leave(self, key: str, name: str) -> None:
        """Remove the session with this name from the group of this key."""
        self._entry(key).members.pop(name, None)

    def _open(self, session: Session | None, context_length: int) -> str:
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        self._entries[name] = _Entry(secret, session, context_length=context_length)
        return f"vb-{name}-{secret}"

    def _entry(self, key: str) -> _Entry:
        return self._entries[key.split("-", 2)[1]]

    def forget(self, key: str) -> None:
        """Stop serving the session or group of this key."""
        self._entries.pop(key.split("-", 2)[1], None)

    # ---- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        door = scope.get("state", {}).get(DOOR)
        if door is not None and (delay := door.requests.delay()):
            await asyncio.sleep(delay)
        request = Request(scope, receive)
        key, route = _split(request)
        reply = ResponseWriter(scope, send, self._protocol(request, route))
        try:
            await self._answer(request, key, route, reply)
        except (ConnectionError, ClientDisconnect, ClientGone):  # no client is left to answer; it may retry
            pass
        except Exception as error:  # noqa: BLE001  answered as an error response
            with contextlib.suppress(ConnectionError):
                await reply.refuse(told(error))

    async def _answer(self, request: Request, key: str | None, route: str, reply: ResponseWriter) -> None:
        if route in ("", "health") and key is None:
            await reply.whole(200, {"status": "ok"})
            return
        entry = self._found(key)
        if entry is None:
            raise Refused(401, "expected the key of an open session, as a bearer token, as x-api-key, or in the path")
        if request.method == "GET" and (route == "models" or route.startswith("models/")):
            await reply.whole(200, _models(entry, route.removeprefix("models").removeprefix("/")))
            return
        name = request.headers.get(SESSION_HEADER, "")
        session = entry.session or entry.members.get(name)
        if session is None:
            raise Refused(404, f"there is no session {name!r:.80} under this key, or it is over")
        posts = (*self._chats.by_route, ROUTE, "reward")
        if request.method != "POST" or route not in posts:
            known = ", ".join(("GET /v1/models", *(f"POST /v1/{name}" for name in posts)))
            raise Refused(404, f"there is no {request.method} {cut(request.url.path, 200)}; the routes are {known}")
        await while_there(request.receive, self._stopped, await self._read(session, request, route, reply))

    async def _read(
        self, session: Session, request: Request, route: str, reply: ResponseWriter
    ) -> Coroutine[Any, Any, None]:
        """Read a request, and return a coroutine that answers it. The body is freed when this function returns, because
        the answer may take minutes."""
        kind = {COUNT: "token_counts", "reward": None}.get(route, "requests")
        async with self._body(session, request, kind) as body:
            if kind is None:
                return self._reward(session, read_value(body, _SMALL), reply)
            session.admit(kind)
            if route == ROUTE:
                return answer_ids(session, request, await read_ids(session, request, body), reply)
            chat = await read_chat(session, request, body, reply.protocol)
            if route == COUNT:
                return self._count_tokens(session, chat, reply)
            return answer_chat(session, request, chat, reply)

    @contextlib.asynccontextmanager
    async def _body(self, session: Session, request: Request, kind: str | None) -> AsyncIterator[bytearray]:
        """Context manager that reads a request's body. Inside the block, the body's bytes count against the session's
        budget. If the session is over or full, the request is refused before its body is read."""
        if session.over:
            raise Refused(410, "this session is over", "session_over")
        limits = self.limits
        size = int(request.headers.get("content-length", 0))  # h11 has checked that it is a number
        async with contextlib.AsyncExitStack() as stack:
            with session.arriving(kind) if kind is not None else contextlib.nullcontext():
                check_head(request, limits.max_body, limits)
                grow = await stack.enter_async_context(self._budget.hold(session, size, limits.body_seconds))
                data = await read_whole(request, limits.max_body, limits, grow)
            yield data

    def _protocol(self, request: Request, route: str) -> ChatProtocol:
        """Return the protocol in which the client of this route expects errors."""
        is_other = route not in self._chats.by_route and "anthropic-version" in request.headers
        return self._chats.of("messages" if is_other else route)

    def _found(self, key: str | None) -> _Entry | None:
        """Return the entry of a key, or None if there is none. The secret part is compared in constant time, and also
        if there is no entry, so that timing does not reveal which keys exist."""
        parts = (key or "").split("-", 2)
        entry = self._entries.get(parts[1]) if len(parts) == 3 and parts[0] == "vb" else None
        secret = entry.secret if entry is not None else secrets.token_urlsafe(24)
        is_right = hmac.compare_digest(parts[-1].encode(), secret.encode())
        return entry if entry is not None and is_right else None

    async def _reward(self, session: Session, given: Any, reply: ResponseWriter) -> None:
        """Store the episode's reward, posted as `{"reward": 1.0}` or `{"reward": {part: number}}`."""
        refuse_lone_surrogates(given)
        reward = given.get("reward") if isinstance(given, dict) else None
        try:
            if reward is None or reward == {} or isinstance(reward, bool):
                raise RolloutError(
                    f'found {given!r:.80}, expected {{"reward": number}} or {{"reward": {{part: number}}}}'
                )
            read_agent_scores(reward, "POST /reward")
        except RolloutError as error:
            raise Refused(400, str(error)) from None
        session.reward = reward
        await reply.whole(200, {"reward": reward})

    async def _count_tokens(self, session: Session, chat: ReadChat, reply: ResponseWriter) -> None:
        """Answer a request of Anthropic's protocol that asks for the number of tokens of a prompt, without sampling."""
        await reply.whole(200, self._chats.anthropic.count(await session.count_tokens(chat.asked)))


def _split(request: Request) -> tuple[str | None, str]:
    """Split a request into (key, route): `/s/KEY/v1/models` is (KEY, "models"). If the path has no key, the key is
    taken from the headers."""
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
    """Return the card of the model with this name, or a list with the only model's card if `name` is empty."""
    card = model_card(name or MODEL, entry.context_length)
    return card if name else model_list(card)
