"""Sends requests to the orchestrator's host, again and again while the connection is broken, and carries files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verbatim.core.disk import make_private
from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.machine_faults import naming
from verbatim.core.texts import cut, printable
from verbatim.inference.http.client import open_session
from verbatim.inference.http.connection_settings import (
    check_address,
    check_installed,
    check_key,
    untrusted,
)
from verbatim.trainer.transport.mirror.protocol import OTHER_BYTES, PART, SESSIONS, files_of

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
logger = logging.getLogger(__name__)

ATTEMPT_SECONDS = 60.0
"""Seconds for one request. What it has carried until then counts."""
STILL_SECONDS = 15.0
"""Seconds without a byte of an answer after which the connection is taken for broken."""
MOST_IN_VAIN = 30
"""Attempts to send files without a byte that arrives, while the other host answers, before the run stops."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds before a request is sent again; doubled each time."""
_TOLD_AFTER = 3
"""Failures one after the other until the log hears of it."""
_CHUNK = 2**20
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class Broken(Exception):
    """The connection broke, or nothing answers: the request is sent again."""


class SessionGone(Exception):
    """The orchestrator's host does not know the session: it has been started again."""


class CannotWrite(RunStopped):
    """The orchestrator's host cannot write: its disk is full, or fails."""


class Busy(Exception):
    """The orchestrator's host has another trainer.

    Args:
        message: Which one.
        alive: Whether that has given a sign of life within seconds.
    """

    def __init__(self, message: str, *, alive: bool) -> None:
        super().__init__(message)
        self.alive = alive


class Link:
    """Requests of the trainer's host.

    Args:
        url: "https://host:8400".
        key: Sent as a bearer token.

    Raises:
        UsageError: no plain http(s) address, a key that no header can hold, or the extra `api` is not installed.
    """

    def __init__(self, url: str, key: str) -> None:
        check_address(url, "--connect")
        check_key(key)
        check_installed()
        self.url = url.rstrip("/")
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._failures = 0
        self._patience = math.inf
        self._silent_since: float | None = None
        """Seconds of the monotonic clock at the first failure since something came; None while something comes."""
        self.trouble: str | None = None
        """How the last request failed; None while the connection holds."""

    async def __aenter__(self) -> Link:
        self._session = open_session(self.url, {"Authorization": f"Bearer {self._key}"}, silence=STILL_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @contextlib.contextmanager
    def patient_for(self, seconds: float) -> Iterator[None]:
        """While the block lasts, take the orchestrator's host for gone after so many seconds without a byte of it.

        Raises:
            RunStopped: it is gone; raised by the request that waits for it.
        """
        before, self._patience = self._patience, seconds
        try:
            yield
        finally:
            self._patience = before

    async def insist(self, method: str, path: str, body: object = None, **query: object) -> dict[str, Any]:
        """The answer to a request, which is sent until there is one.

        Raises:
            UsageError: the key is wrong, or the request is refused.
            CannotWrite: the orchestrator's host cannot write.
            SessionGone: it has been started again.
            Busy: it has another trainer.
        """
        return await self._persist(lambda: self.ask(method, path, body, **query))

    async def ask(self, method: str, path: str, body: object = None, **query: object) -> dict[str, Any]:
        """The answer to one attempt. `body` is JSON, or bytes.

        Raises:
            Broken: there was no answer; more as `insist`.
        """
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self._open(method, path, data, query) as response:
            answer = await response.read()
        try:
            found = json.loads(answer)
        except ValueError:
            found = answer
        if not isinstance(found, dict):
            raise UsageError(f"{self.url} is no orchestrator's host: it answers {cut(repr(found), 100)}")
        return found

    async def download(self, path: str, target: Path, size: int, sha256: str, **query: object) -> None:
        """Fetch a file, from the last byte on that an earlier attempt, or process, has left.

        Raises:
            RunStopped: it arrived with other bytes three times.
            OSError: the system refused to write.
        """
        partial = target.with_name(f".{target.name}.tmp")
        for _ in range(OTHER_BYTES):
            digest = await asyncio.to_thread(_digest_of, partial)
            while (done := _size(partial)) < size:
                await self._persist(functools.partial(self._download_rest, path, partial, size, digest, query))
            if done == size and digest.hexdigest() == sha256:
                os.replace(partial, target)
                return
            logger.warning("%s arrived with other bytes than %s has; it is fetched again", target, self.url)
            os.unlink(partial)
        raise RunStopped(f"{target} arrived from {self.url} with another sha256 {OTHER_BYTES} times, expected {sha256}")

    async def _download_rest(
        self, path: str, partial: Path, size: int, digest: hashlib._Hash, query: Mapping[str, object]
    ) -> None:
        if (there := _size(partial)) >= size:  # the attempt before failed after the last byte
            return
        headers = {"Range": f"bytes={there}-"}
        async with self._open("GET", path, None, query, headers=headers) as response:
            with naming(partial), partial.open("ab") as file:
                async for chunk in response.content.iter_chunked(_CHUNK):
                    self._silent_since = None
                    await _to_its_end(_append, file, digest, chunk)

    async def upload(self, session: str, folder: str, source: Path) -> None:
        """Send a folder, as far as it is not there; then it has its name there.

        Raises:
            RunStopped: a file arrived with other bytes three times, the orchestrator's host cannot write, or it answers
                and no byte of the files arrives.
        """
        files, wrong = await asyncio.to_thread(files_of, source), dict[str, int]()
        route = f"{SESSIONS}/{session}"
        before, in_vain, pause = None, 0, _FIRST_PAUSE
        while True:
            reply = await self.insist("POST", f"{route}/folders", files, folder=folder)
            for name in reply["wrong"]:
                logger.warning("%s arrived with other bytes at %s; it is sent again", source / name, self.url)
                wrong[name] = wrong.get(name, 0) + 1
                if wrong[name] >= OTHER_BYTES:
                    raise RunStopped(f"{source / name} arrived at {self.url} with another sha256 {OTHER_BYTES} times")
            if not reply["missing"]:
                return
            if reply["missing"] != before:
                before, in_vain, pause = reply["missing"], 0, _FIRST_PAUSE
            else:
                in_vain += 1
                if in_vain == MOST_IN_VAIN:
                    raise RunStopped(
                        f"{self.url} answers, but no byte of {source} has arrived there in {in_vain} attempts "
                        f"({self.trouble}); does something between the two hosts refuse large requests?"
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            for name, offset in reply["missing"].items():
                with contextlib.suppress(Broken):  # what is there is asked for again
                    await self._send(f"{route}/parts", folder, source / name, name, offset)

    async def _send(self, route: str, folder: str, path: Path, name: str, offset: int) -> None:
        with path.open("rb") as file:
            while part := await asyncio.to_thread(_read_part, file, offset):
                try:
                    reply = await self.ask("PUT", route, part, folder=folder, file=name, offset=offset)
                except Broken as failure:
                    self._note(failure)
                    raise
                offset = reply["size"]

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE
        while True:
            try:
                found = await attempt()
            except Broken as failure:
                self._note(failure)
                self._refuse_silence()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            self._note(None)
            return found

    def _note(self, failure: Broken | None) -> None:
        self._failures = 0 if failure is None else self._failures + 1
        self.trouble = None if failure is None else str(failure)
        if failure is None:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        if self._failures == _TOLD_AFTER:
            logger.info("%s: %s; trying again", self.url, failure)

    def _refuse_silence(self) -> None:
        silent = 0.0 if self._silent_since is None else time.monotonic() - self._silent_since
        if silent > self._patience:
            raise RunStopped(
                f"nothing has come from {self.url} for {silent:.0f} s ({self.trouble}); once the "
                "orchestrator runs, start this trainer again"
            )

    @contextlib.asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        data: bytes | None,
        query: Mapping[str, object],
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        assert self._session is not None
        request = self._session.request(
            method,
            self.url + path,
            data=data,
            params={key: str(value) for key, value in query.items()},
            headers=headers,
            allow_redirects=False,
        )
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS), request as response:
                if response.status not in (200, 206):
                    await self._refuse(response)
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            raise UsageError(f"{self.url}: {untrusted(error.certificate_error)}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Broken(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        body = await response.read()
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        said = printable(cut(str(found.get("error") or body.decode("utf-8", "replace")), 500))
        if response.status == 401:
            raise UsageError(
                f"{self.url} refuses the key; put the same one into the variable that --api-key-env names on both hosts"
            )
        if response.status == 410:
            raise SessionGone(said)
        if response.status == 507:
            raise CannotWrite(f"the orchestrator's host {self.url} cannot write: {said}")
        if response.status in _PASSING:
            raise Broken(f"status {response.status}: {said}")
        if found.get("busy"):
            raise Busy(said, alive=bool(found.get("alive")))
        raise UsageError(f"{self.url}: {said or f'status {response.status}'}")


def _size(path: Path) -> int:
    return path.stat().st_size


def _digest_of(partial: Path) -> hashlib._Hash:
    """SHA-256 of what is there, which may be nothing."""
    make_private(partial)
    with partial.open("ab+") as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256")


async def _to_its_end(work: Callable[..., None], *arguments: Any) -> None:
    """Run the work on a thread. A caller that is cancelled, or late, leaves once it has ended: half of it would be done
    behind the back of the next attempt."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(working)
    finally:
        await asyncio.wait({working})


def _append(file: Any, digest: hashlib._Hash, chunk: bytes) -> None:
    file.write(chunk)
    file.flush()
    digest.update(chunk)


def _read_part(file: Any, offset: int) -> bytes:
    file.seek(offset)
    return bytes(file.read(PART))
