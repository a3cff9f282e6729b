"""Answers the requests of the trainer's host, in the orchestrator's process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verbatim.core.errors import UsageError
from verbatim.core.machine_faults import describe
from verbatim.core.texts import cut, printable, shown
from verbatim.inference.elsewhere import bearer_of, is_key
from verbatim.inference.http.exchange import read_whole
from verbatim.inference.http.json_text import read_value
from verbatim.inference.http.limits import ConnectionLimits
from verbatim.inference.http.request_body import Refused as RefusedBody
from verbatim.trainer.transport.exchange import READY, Exchange, answer_name, message_name
from verbatim.trainer.transport.files import publish_bytes
from verbatim.trainer.transport.heartbeat import read_beat
from verbatim.trainer.transport.mirror.incoming import Incoming
from verbatim.trainer.transport.mirror.protocol import (
    LONGEST_WAIT,
    MOST_JSON,
    PROTOCOL,
    RUN,
    SESSIONS,
    Files,
    is_file_name,
    is_uploaded,
    mark_of,
)
from verbatim.trainer.transport.weights import WeightFolders

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.005
_REFUSAL_SECONDS = 0.25
"""Seconds before a wrong key is refused."""
_QUIET = 5.0
"""Seconds without a request after which a trainer may be replaced, where it serves no orchestrator yet."""
LIMITS = ConnectionLimits(max_connections=64)
"""A trainer has a handful of connections."""
_SESSION = re.compile(r"[0-9a-f]{16}")


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, **more: Any) -> None:
        super().__init__(text)
        self.status, self.body = status, {"error": text, **more}


@dataclass(eq=False)
class Session:
    """The trainer that is served."""

    exchange: Exchange
    who: str
    incoming: Incoming
    heard: float
    """Seconds of the monotonic clock at its last request."""
    ended: str | None = None
    """What it said as it ended."""
    answers: int = 0
    """Answers that have arrived."""
    beats_are_lost: bool = False
    """Whether its last heartbeat could not be written here."""
    digests: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Size and sha256 of the message that is asked for."""
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a file is published: a request that is sent again may find the first one at work on it."""


class _File(FileResponse):
    chunk_size = 2**20


class MirrorApp:
    """An ASGI application over one run folder.

    Args:
        run: The orchestrator's run folder.
        config: The run's configuration as TOML, which has to be the trainer's.
        offers: Sealed folders that a trainer may need: the newest checkpoint, the model that the run begins with.
        keep: Newest versions of the weights that are kept.
        key: Every request has to bring it.
    """

    def __init__(self, run: Path, *, config: str, offers: Mapping[str, Files], keep: int, key: str) -> None:
        self._run, self._config, self._offers, self._keep = run, config, offers, keep
        self._key = key.encode()
        self.session: Session | None = None
        """The trainer that is served; None before the first."""
        self.stopping = False
        """Whether requests that wait are to be answered now."""
        self._beginning = asyncio.Lock()
        in_session = f"{SESSIONS}/{{session}}"
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("POST", RUN, self._describe),
            ("GET", f"{RUN}/files", self._offered),
            ("POST", in_session, self._begin),
            ("DELETE", in_session, self._end),
            ("PUT", f"{in_session}/beat", self._beat),
            ("GET", f"{in_session}/messages/{{number:int}}", self._message),
            ("GET", f"{in_session}/messages/{{number:int}}/content", self._content),
            ("POST", f"{in_session}/folders", self._folder),
            ("PUT", f"{in_session}/parts", self._part),
            ("PUT", f"{in_session}/ready", self._ready),
            ("PUT", f"{in_session}/answers/{{number:int}}", self._answer),
        ]
        self._app = Starlette(
            routes=[
                Route(path, functools.partial(_answered, handle), methods=[method]) for method, path, handle in routes
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, if it brings the key."""
        if scope["type"] != "http":
            return
        if is_key(bearer_of(scope["headers"]), self._key):
            await self._app(scope, receive, send)
            return
        await asyncio.sleep(_REFUSAL_SECONDS)
        refusal = JSONResponse({"error": "a wrong key, or none"}, 401, {"connection": "close"})
        await refusal(scope, receive, send)

    # ---- before a session

    async def _describe(self, request: Request) -> dict[str, Any]:
        found = (await _json(request)).get("protocol")
        if found != PROTOCOL:
            raise Refused(
                400,
                f"the trainer's host speaks version {shown(found)} of this protocol, expected "
                f"{PROTOCOL}; install the same version of Verbatim on both hosts",
            )
        return {"protocol": PROTOCOL, "config": self._config, "offers": self._offers}

    async def _offered(self, request: Request) -> Response:
        name = request.query_params.get("file", "")
        if not any(
            name.removeprefix(f"{folder}/") in files
            for folder, files in self._offers.items()
            if name.startswith(f"{folder}/")
        ):
            raise Refused(
                404,
                f"{shown(name)} is not offered; if the orchestrator was started again meanwhile, start "
                "this trainer again",
            )
        return _File(self._run / name)

    async def _begin(self, request: Request) -> dict[str, Any]:
        session, body = request.path_params["session"], await _json(request)
        if not _SESSION.fullmatch(session):
            raise Refused(400, f"session {shown(session)}: expected 16 hexadecimal digits")
        newest = next((name for name in self._offers if name.startswith("checkpoints/")), None)
        if body.get("checkpoint") != newest:
            raise Refused(
                409,
                f"the trainer begins from {shown(body.get('checkpoint'))}, expected {newest}: the run "
                "has gone on meanwhile; start `verbatim trainer` again",
            )
        async with self._beginning:  # opening an exchange removes the one before
            await self._open_session(session, cut(printable(str(body.get("who"))), 200))
        return {}

    async def _open_session(self, session: str, who: str) -> None:
        old, now = self.session, time.monotonic()
        if old is not None and old.exchange.folder.name == session:
            return
        if old is not None and (old.exchange.is_attached or (old.ended is None and now - old.heard < _QUIET)):
            quiet = now - old.heard
            raise Refused(
                409,
                f"the orchestrator has a trainer, {old.who}, heard of {quiet:.0f} s ago; end it first",
                busy=True,
                alive=old.ended is None and quiet < _QUIET,
            )
        exchange = await asyncio.to_thread(Exchange.open, self._run / "exchange", session)
        publish_bytes(exchange.config, self._config.encode(), private=True)
        incoming = Incoming(
            self._run, exchange.folder / "incoming", WeightFolders(self._run / "weights", keep=self._keep)
        )
        self.session = Session(exchange, who, incoming, time.monotonic())
        logger.info("the trainer is %s", who)

    # ---- in a session

    def _found(self, request: Request) -> Session:
        session = self.session
        if session is None or session.exchange.folder.name != request.path_params["session"]:
            raise Refused(410, "there is no such session: the orchestrator has been started again")
        session.heard = time.monotonic()
        return session

    async def _end(self, request: Request) -> dict[str, Any]:
        session = self._found(request)
        session.ended = cut(printable(str((await _json(request)).get("why") or "")), 2000)
        return {}

    async def _beat(self, request: Request) -> dict[str, Any]:
        session, beat = self._found(request), await _body(request)
        exchange = session.exchange
        try:
            async with session.publishing:
                await asyncio.to_thread(publish_bytes, exchange.trainer_beat, beat)
            session.beats_are_lost = False
        except OSError as error:
            if not session.beats_are_lost:  # every half second
                session.beats_are_lost = True
                logger.error("heartbeats of the trainer cannot be written: %s", describe(error))
            raise Refused(507, describe(error)) from None
        theirs = read_beat(exchange.orchestrator_beat)
        return {"orchestrator": None if theirs is None else vars(theirs), "attached": exchange.is_attached}

    async def _message(self, request: Request) -> dict[str, Any]:
        session, number = self._found(request), request.path_params["number"]
        messages, until = session.exchange.messages, time.monotonic() + LONGEST_WAIT
        (messages / message_name(number - 1)).unlink(missing_ok=True)  # whoever asks for the next one has it
        path = messages / message_name(number)
        while number not in session.digests:
            if path.exists():
                session.digests = {number: await asyncio.to_thread(mark_of, path)}
            elif self.stopping or time.monotonic() > until:
                return {"message": None}
            else:
                await asyncio.sleep(_LOOK_SECONDS)
        return {"message": session.digests[number]}

    async def _content(self, request: Request) -> Response:
        path = self._found(request).exchange.messages / message_name(request.path_params["number"])
        if not path.exists():
            raise Refused(404, f"{path.name} is not there")
        return _File(path)

    async def _folder(self, request: Request) -> dict[str, Any]:
        session, folder, body = self._found(request), _folder_name(request), await _json(request)
        try:
            files = {name: (int(size), str(sha256)) for name, (size, sha256) in body.items()}
        except (TypeError, ValueError):
            raise Refused(400, 'expected {"file": [size, sha256], ...}') from None
        if not files or not all(map(is_file_name, files)):
            raise Refused(
                400,
                "expected names of files below the folder, of letters, digits, dots, dashes and "
                f"underscores; found {shown(list(files), 500)}",
            )
        missing, wrong = await session.incoming.announce(folder, files)
        return {"missing": missing, "wrong": wrong}

    async def _part(self, request: Request) -> dict[str, Any]:
        session, folder = self._found(request), _folder_name(request)
        name, offset = request.query_params.get("file", ""), request.query_params.get("offset", "")
        found = session.incoming.file(folder, name)
        if found is None or not offset.isdecimal():
            raise Refused(404, f"{shown(name)} of {folder} was not announced, or is there already")
        return {"size": await found.append(int(offset), _parts(request, session))}

    async def _ready(self, request: Request) -> dict[str, Any]:
        session, body = self._found(request), await _body(request)
        async with session.publishing:
            await asyncio.to_thread(publish_bytes, session.exchange.folder / READY, body)
        return {}

    async def _answer(self, request: Request) -> dict[str, Any]:
        session, number, body = self._found(request), request.path_params["number"], await _body(request)
        async with session.publishing:
            if number == session.answers + 1:  # one that came before has been taken away already
                answers = session.exchange.answers
                await asyncio.to_thread(publish_bytes, answers / answer_name(number), body)
                session.answers = number
        return {}


async def _answered(handle: Callable[[Request], Awaitable[Any]], request: Request) -> Response:
    try:
        found = await handle(request)
    except Refused as refused:
        return JSONResponse(refused.body, refused.status)
    except ClientDisconnect:
        return Response(status_code=400)  # the client is gone
    except OSError as error:
        logger.error("a file of the trainer's host could not be taken: %s", describe(error))
        return JSONResponse({"error": describe(error)}, 507)
    return found if isinstance(found, Response) else JSONResponse(found)


async def _parts(request: Request, session: Session) -> AsyncIterator[bytes]:
    """The parts of a file, of which the next one always comes in time."""
    parts = request.stream()
    while True:
        try:
            async with asyncio.timeout(LIMITS.body_seconds):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refused(408, f"no part of the file came for {LIMITS.body_seconds:g} s") from None
        session.heard = time.monotonic()
        yield part


async def _body(request: Request) -> bytes:
    try:
        return bytes(await read_whole(request, MOST_JSON, LIMITS))
    except RefusedBody as refused:
        raise Refused(refused.status, refused.message) from None


async def _json(request: Request) -> dict[str, Any]:
    body = await _body(request)
    with contextlib.suppress(UsageError):
        found = read_value(body)
        if isinstance(found, dict):
            return found
    raise Refused(400, "expected a JSON object")


def _folder_name(request: Request) -> str:
    folder = request.query_params.get("folder", "")
    of_another = folder.startswith("exchange/") and folder.split("/")[1] != request.path_params["session"]
    if not is_uploaded(folder) or of_another:
        raise Refused(400, f"{shown(folder)} is no folder that a trainer writes")
    return folder
