"""Receives weights over HTTP, for hosts without a shared folder: in parts, resumable, checked by SHA-256.

    GET  /verbatim/v1/uploads/FOLDER/FILE            {"size": bytes received so far}
    PUT  /verbatim/v1/uploads/FOLDER/FILE?offset=N   the bytes from N on; 409 with {"size": ...} if N is not the size
    POST /verbatim/v1/uploads/FOLDER                 {"FILE": "sha256", ...}: {"path": ...} once all files match;
                                                     then the folders of other versions are deleted

Our own server uses this module, and so does vLLM through `verbatim_vllm_http`, so it imports only the standard library.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

PREFIX = "/verbatim/v1/uploads/"
# The first character excludes "." and "..", so that no name leaves the folder for uploads.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"v\d+")
_MOST_JSON = 2**20
"""Maximum size of a JSON body, in bytes."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def take(root: Path | None, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
    """Handle one request.

    Args:
        root: The folder for uploads, with a subfolder for each version; None to refuse uploads.
        scope: ASGI's scope; its path begins with `PREFIX`.
        receive: ASGI's receive.

    Returns:
        (the HTTP status, the JSON of the answer).
    """
    if root is None:
        return 404, {"error": "this server accepts no uploads"}
    names = scope["path"][len(PREFIX) :].split("/")
    if len(names) not in (1, 2) or not all(_NAME.fullmatch(name) for name in names):
        return 400, {"error": "expected FOLDER or FOLDER/FILE of letters, digits, dots, dashes and underscores"}
    path = root.joinpath(*names)
    try:
        if len(names) == 2 and scope["method"] == "GET":
            return 200, {"size": _size(path)}
        if len(names) == 2 and scope["method"] == "PUT":
            return await _append(path, parse_qs(scope["query_string"].decode()), receive)
        if len(names) == 1 and scope["method"] == "POST":
            return await _finish(path, receive)
    except OSError as error:
        return 500, {"error": f"{type(error).__name__}: {error}"}
    return 405, {"error": f"this route does not support {scope['method']}"}


async def _append(path: Path, query: dict[str, list[str]], receive: Receive) -> tuple[int, dict[str, Any]]:
    try:
        offset = int(query["offset"][0])
    except (KeyError, ValueError):
        return 400, {"error": "expected ?offset=N"}
    if offset != _size(path):
        return 409, {"size": _size(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Parts are written as they arrive, so that after a broken connection the client continues from the size that is
    # there.
    with path.open("ab") as file:
        async for part in _body(receive):
            await asyncio.to_thread(file.write, part)
    return 200, {"size": _size(path)}


async def _finish(folder: Path, receive: Receive) -> tuple[int, dict[str, Any]]:
    body = b""
    async for part in _body(receive):
        body += part
        if len(body) > _MOST_JSON:
            return 413, {"error": "more than 1 MiB of JSON"}
    try:
        expected = dict(json.loads(body))
    except (ValueError, TypeError):
        return 400, {"error": 'expected {"FILE": "sha256", ...}'}
    wrong = []
    for name, digest in expected.items():
        if not _NAME.fullmatch(str(name)):
            wrong.append(name)
        elif await asyncio.to_thread(sha256, folder / name) != digest:
            wrong.append(name)
            (folder / name).unlink(missing_ok=True)  # otherwise the client would resume after wrong bytes
    if wrong:
        return 422, {"wrong": wrong}
    for other in folder.parent.iterdir():
        if other != folder and _VERSION.fullmatch(other.name):  # everything else in the folder is not ours
            # In a thread, because deleting large files would block the event loop, which also serves requests.
            await asyncio.to_thread(shutil.rmtree, other, ignore_errors=True)
    return 200, {"path": str(folder)}


async def _body(receive: Receive) -> Any:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client disconnected")
        more = message.get("more_body", False)
        yield message.get("body", b"")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
