"""What Verbatim adds to a vLLM server's HTTP: a key for every route, and uploads of weights (`--middleware`).

vLLM's own key guards /v1 and /inference only; whoever reaches the port could pause the server, load other weights or
call any method of its workers. Here every route but /health needs the key in VERBATIM_KEY, where there is one.

Uploads are for hosts without a shared folder. They land in VERBATIM_UPLOADS, in a folder for each version:

    GET  /verbatim/v1/uploads/FOLDER/FILE            {"size": bytes that are there}
    PUT  /verbatim/v1/uploads/FOLDER/FILE?offset=N   the bytes from N on; 409 with {"size": ...} if N is not the size
    POST /verbatim/v1/uploads/FOLDER                 {"FILE": "sha256", ...}: {"path": ...} once all of them are right;
                                                     other folders are removed then
This module runs in vLLM's processes and imports the standard library only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

PREFIX = "/verbatim/v1/uploads/"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MOST_JSON = 2**20

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware: the key for every route but /health, and the routes of uploads."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._key = os.environ.get("VERBATIM_KEY") or None
        uploads = os.environ.get("VERBATIM_UPLOADS") or None
        self._uploads = None if uploads is None else Path(uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on to vLLM."""
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
        elif not self._is_allowed(scope):
            await _answer(send, 401, {"error": {"message": "this server needs a key (bearer token)", "code": 401}})
        elif scope["path"].startswith(PREFIX):
            await _answer(send, *await self._upload(scope, receive))
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self._key.encode())

    async def _upload(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        if self._uploads is None:
            return 404, {"error": "this server takes no uploads: VERBATIM_UPLOADS names no folder"}
        names = scope["path"][len(PREFIX) :].split("/")
        if len(names) not in (1, 2) or not all(_NAME.fullmatch(name) for name in names):
            return 400, {"error": "expected FOLDER or FOLDER/FILE of letters, digits, dots, dashes and underscores"}
        path = self._uploads.joinpath(*names)
        try:
            if len(names) == 2 and scope["method"] == "GET":
                return 200, {"size": _size(path)}
            if len(names) == 2 and scope["method"] == "PUT":
                return await _append(path, parse_qs(scope["query_string"].decode()), receive)
            if len(names) == 1 and scope["method"] == "POST":
                return await _finish(path, receive)
        except OSError as error:
            return 500, {"error": f"{type(error).__name__}: {error}"}
        return 405, {"error": f"{scope['method']} is not for this route"}


async def _append(path: Path, query: dict[str, list[str]], receive: Receive) -> tuple[int, dict[str, Any]]:
    try:
        offset = int(query["offset"][0])
    except (KeyError, ValueError):
        return 400, {"error": "expected ?offset=N"}
    if offset != _size(path):
        return 409, {"size": _size(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        async for part in _body(receive):
            await asyncio.to_thread(file.write, part)
    return 200, {"size": _size(path)}


async def _finish(folder: Path, receive: Receive) -> tuple[int, dict[str, Any]]:
    body = b""
    async for part in _body(receive):
        body += part
        if len(body) > _MOST_JSON:
            return 413, {"error": "more than a mebibyte of JSON"}
    try:
        expected = dict(json.loads(body))
    except (ValueError, TypeError):
        return 400, {"error": 'expected {"FILE": "sha256", ...}'}
    wrong = []
    for name, digest in expected.items():
        if not _NAME.fullmatch(str(name)):
            wrong.append(name)
        elif await asyncio.to_thread(_sha256, folder / name) != digest:
            wrong.append(name)
            (folder / name).unlink(missing_ok=True)  # sent again from the start
    if wrong:
        return 422, {"wrong": wrong}
    for other in folder.parent.iterdir():
        if other != folder:
            await asyncio.to_thread(shutil.rmtree, other, ignore_errors=True)
    return 200, {"path": str(folder)}


async def _body(receive: Receive) -> Any:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        more = message.get("more_body", False)
        yield message.get("body", b"")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
