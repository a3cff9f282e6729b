"""Patient connections to one server: JSON in, JSON out, tried again where that may help, from any event loop.

What may pass (a lost connection, 429, 500, 503, ...) is tried again after a growing pause. What one of our servers
says in its own words is its last word.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from verbatim.errors import SamplerFault, UsageError, VerbatimError
from verbatim.inference.chat.client import pause, text_of
from verbatim.inference.http import protocol

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_MOST_CONNECTIONS = 1024
"""Requests under way at a time; more wait their turn."""
_IDLE = 30.0
"""Seconds that an idle connection is kept: shorter than our server keeps it, so that it is never found closed."""
CONNECT = 10.0
"""Seconds for a connection, or for a question that needs no sampling."""


@dataclass(eq=False)
class _Lines:
    """What belongs to one event loop: its connections, and what is under way on them.

    Each connection is a client of its own, taken from the idle ones: a client with many goes through all of them for
    each request.
    """

    make_client: Callable[[], Any]
    idle: list[Any] = field(default_factory=list)
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_CONNECTIONS))

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        """An idle connection.

        One whose request failed or was cancelled is not used again: cancelled at the wrong moment, httpx's client
        believes for ever that its connection is taken (https://github.com/encode/httpcore/issues/1093).
        """
        async with self.places:
            client = self.idle.pop() if self.idle else self.make_client()
            try:
                yield client
            except BaseException:
                closing = asyncio.create_task(client.aclose())
                self.closing.add(closing)
                closing.add_done_callback(self.closing.discard)
                raise
            self.idle.append(client)


class HungUp(SamplerFault):
    """Our side closed the connections while this was under way."""


class HttpClient:
    """Connections to one server, made as they are needed. They can be pickled, and used from several event loops.

    Args:
        url: The server's root: "http://127.0.0.1:8000".
        api_key: Sent as a bearer token.
        request_timeout: Seconds for one try.
        max_retries: Tries after the first.

    Raises:
        UsageError: no plain http(s) address, or httpx is not installed.
    """

    def __init__(self, url: str, *, api_key: str | None, request_timeout: float, max_retries: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise UsageError(f"url {url.rpartition('@')[2]!r}; expected a plain address such as "
                             '"http://127.0.0.1:8000" (a key is given as api_key)')  # fmt: skip
        _import_httpx()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._request_timeout = request_timeout
        self._max_retries = max_retries
        self._closed = False
        self._random = random.Random()
        self._lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Lines] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lines": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lines=weakref.WeakKeyDictionary())

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing_ok: bool = False,
        if_missing: str = "",
    ) -> Any:  # fmt: skip
        """The JSON of an answer, asked for until it comes; None where `missing_ok` and there is no such endpoint.

        `if_missing` is what people are told beside a 404.

        Raises:
            VerbatimError: the server's own, or SamplerFault.
            HungUp: `close` was called meanwhile.
        """
        task = asyncio.create_task(self._ask(method, path, body, missing_ok, if_missing))
        under_way = self._of_this_loop().under_way
        under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and not (current is not None and current.cancelling()):
                raise HungUp("the sampler was closed before the server had answered") from None
            raise
        finally:
            under_way.discard(task)

    async def close(self) -> None:
        """No more questions; what is under way in this event loop is given up."""
        self._closed = True
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close this event loop's connections; they are made anew when they are needed."""
        lines = self._lines.pop(asyncio.get_running_loop(), None)
        if lines is not None:
            under_way = list(lines.under_way)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            for client in lines.idle:
                await client.aclose()
            await asyncio.gather(*lines.closing, return_exceptions=True)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, missing_ok: bool, if_missing: str
    ) -> Any:
        httpx = _import_httpx()
        lines = self._of_this_loop()
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        failure = ""
        for attempt in range(self._max_retries + 1):
            if attempt:
                await asyncio.sleep(pause(attempt - 1, 0.0, self._random))
            try:
                async with lines.one() as client:
                    response = await client.request(method, path, content=data)
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                try:
                    return json.loads(response.content)
                except (ValueError, RecursionError):
                    failure = f"an answer that is no JSON: {text_of(response)[:200]!r}"
                    continue
            if response.status_code == 404 and missing_ok:
                return None
            ours = _read_error(response)
            if ours is not None:
                raise ours
            failure = f"status {response.status_code}: {' '.join(text_of(response)[:300].split())}"
            if response.status_code == 404:
                failure = f"{path}: {failure}{f' ({if_missing})' if if_missing else ''}"
            if response.status_code not in _PASSING:
                raise SamplerFault(f"{self.url}: {failure}")
        raise SamplerFault(f"{self.url}: {failure} ({self._max_retries + 1} tries)")

    def _of_this_loop(self) -> _Lines:
        """Connections live in one event loop each."""
        if self._closed:
            raise SamplerFault("the sampler is closed; make a new one")
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            for ended in [other for other in list(self._lines) if other.is_closed()]:
                del self._lines[ended]  # a connection holds on to its loop; so both are let go of, and closed
            self._lines[loop] = _Lines(self._client_maker())
        return self._lines[loop]

    def _client_maker(self) -> Callable[[], Any]:
        httpx = _import_httpx()
        key = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        return functools.partial(
            httpx.AsyncClient,
            base_url=self.url,
            headers={"Content-Type": "application/json", **key},
            timeout=httpx.Timeout(self._request_timeout, connect=CONNECT),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_IDLE),
            verify=ssl.create_default_context(),
            trust_env=False,  # a proxy for the outside world is not asked about the machine next door
        )


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise UsageError("a sampler behind HTTP needs httpx: pip install 'verbatim-rl[serve]'") from None
    return httpx


def _read_error(response: Any) -> VerbatimError | None:
    try:
        return protocol.read_error(json.loads(response.content))
    except (ValueError, RecursionError):
        return None
