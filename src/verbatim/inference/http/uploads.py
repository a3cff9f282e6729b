"""Uploads a published folder, in parts, to a host that has no access to the folder. Uploads can be resumed and are
verified by sha256."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from verbatim.core.errors import SamplerFault
from verbatim.core.texts import brief
from verbatim.inference.elsewhere import sha256
from verbatim.inference.http.client import AttemptFailed, HttpClient, HttpResponse, encode, read_json

ROUTE = "/verbatim/v1/uploads"
PART = 2**23
"""Maximum bytes of one uploaded part."""
_ATTEMPTS = 3
"""Maximum number of attempts to upload a file if its checksum is wrong on arrival."""


Deliver = Callable[[Path], Awaitable[str]]
"""A function that brings a published folder to a server's host, and returns the folder's path there. It raises
SamplerFault if that fails."""


async def path_there(
    client: HttpClient, folder: Path, version: int, *, shares_folders: bool, deliver: Deliver | None = None
) -> str:
    """The path of a published folder on the server's host. A copy is uploaded first if the host does not have the
    folder.

    Args:
        client: Client of the server.
        folder: The published folder.
        version: Policy version of its weights.
        shares_folders: True if the server's host has the folder at the same path.
        deliver: Brings the folder there in place of an upload.

    Raises:
        SamplerFault: see `upload` and `Deliver`.
    """
    if deliver is not None:
        return await deliver(folder)
    if shares_folders:
        return str(await asyncio.to_thread(folder.absolute))
    return await upload(client, folder, await asyncio.to_thread(digests_of, folder), version)


def digests_of(folder: Path) -> dict[str, str]:
    """Map each file name in a folder to the sha256 of the file."""
    return {path.name: digest for path in sorted(folder.iterdir()) if (digest := sha256(path)) is not None}


async def upload(client: HttpClient, folder: Path, digests: Mapping[str, str], version: int) -> str:
    """Upload the parts of a folder that the server does not have yet.

    Args:
        client: Client of a server that handles uploads as `vllm/plugin/verbatim_uploads.py` does.
        folder: The published folder.
        digests: `digests_of(folder)`.
        version: Policy version of its weights.

    Returns:
        The folder's path on the server's host.

    Raises:
        SamplerFault: the server does not accept uploads, or a file is still wrong after three attempts.
    """
    there = f"{ROUTE}/v{version}"
    wrong = list(digests)
    for _ in range(_ATTEMPTS):
        for name in wrong:
            await _send(client, folder / name, f"{there}/{name}")
        answer = await client.ask("POST", there, encode(dict(digests)), _read)
        if "path" in answer:
            return str(answer["path"])
        wrong = [name for name in answer.get("wrong", digests) if name in digests]
    raise SamplerFault(f"{client.url}: {', '.join(wrong)} of {folder} arrived with wrong bytes {_ATTEMPTS} times")


async def _send(client: HttpClient, path: Path, route: str) -> None:
    offset = _size_in(client, await client.ask("GET", route, None, _read))
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while offset < size or size == 0:
            file.seek(offset)
            part = await asyncio.to_thread(file.read, PART)
            # If the response to a part was lost, the offset of the retry is wrong, and the server replies with the
            # current size.
            offset = _size_in(client, await client.ask("PUT", f"{route}?offset={offset}", part, _read))
            if size == 0:
                return  # one request is needed to create an empty file


def _size_in(client: HttpClient, answer: Mapping[str, Any]) -> int:
    size = answer.get("size")
    if type(size) is not int:
        raise SamplerFault(f"{client.url}: expected the size of an uploaded file, found {brief(answer)}")
    return size


def _read(answer: HttpResponse) -> dict[str, Any]:
    """The JSON of a response. 409 (wrong offset) and 422 (wrong checksums) are results here instead of failures."""
    if answer.status == 404:
        raise AttemptFailed(
            "no_uploads",
            "the server does not accept uploads: start it with --uploads FOLDER (`verbatim inference`, `verbatim "
            "serve`), or share the run folder with its host",
            final=True,
        )
    if answer.status in (409, 422):
        answer = HttpResponse(path=answer.path, status=200, body=answer.body, headers=answer.headers)
    found = read_json(answer)
    if not isinstance(found, dict):
        raise AttemptFailed("bad_answer", f"expected a JSON object, found {brief(found)}")
    return found
