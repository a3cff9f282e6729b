"""Sends HTTP requests to samplers, chat servers and teachers, and retries where that may help.

Each attempt has a deadline. A failure that may pass (a lost connection, a deadline, 429, 5xx, a broken answer) is
retried after a growing pause, or when the server's `Retry-After` says so; any other is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import json
import logging
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from verbatim.core.errors import SamplerFault
from verbatim.core.imports import refuse_without
from verbatim.core.redaction import REDACTED, hide
from verbatim.core.tasks import cancel_all
from verbatim.inference.http.connection_settings import (
    certificates,
    check_address,
    check_key,
    check_limits,
    proxy_of_environment,
    untrusted,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Seconds after the first failure; doubled after each further one, give or take a half."""
LONGEST_PAUSE = 30.0
"""Seconds; what it is doubled up to."""
LONGEST_RETRY_AFTER = 120.0
"""Seconds that a server may ask to wait; a longer wait is a final failure."""
CONNECT = 10.0
"""Seconds for a connection, or for a question that needs no sampling."""
MAX_ANSWER_BYTES = 2**28
"""Larger answers are refused while they arrive: the prompt logprobs of a million ids take two thirds of it."""
_PASSING = {408, 409, 425, 429}
"""Statuses that are retried, beside those from 500 on."""
_MAX_CONNECTIONS = 1024
"""Attempts under way at a time; more wait their turn, outside of their deadline."""
_IDLE = 30.0
"""Seconds that an idle connection is kept: shorter than our server keeps it, so that it is never found closed."""
_SHORTEST_SECRET = 8
"""Characters. Shorter keys ("EMPTY", "none") hide nothing, and would be found inside ordinary words."""


@dataclass(frozen=True)
class HttpResponse:
    """What a server answered to one attempt."""

    path: str
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """The body as UTF-8, whatever character set the server names."""
        return self.body.decode("utf-8", "replace")


class AttemptFailed(Exception):
    """One attempt failed.

    Args:
        kind: What is counted: "status_500", "connection", "timeout", "bad_answer", "unsendable".
        text: For people; the client hides the api key in it.
        retry_after: Seconds that the server asks to wait.
        final: No retry can help.
    """

    def __init__(self, kind: str, text: str, *, retry_after: float = 0.0, final: bool = False) -> None:
        super().__init__(text)
        self.kind, self.text, self.retry_after, self.final = kind, text, retry_after, final


class ClientClosed(SamplerFault):
    """Our side closed the connections while this request was under way."""


@dataclass(eq=False)
class _LoopState:
    """What belongs to one event loop: its connections, and the requests under way."""

    session: aiohttp.ClientSession
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_CONNECTIONS))


class HttpClient:
    """Requests to one server. Connects when needed; can be pickled, and used from several event loops.

    Args:
        url: What every path is appended to: "http://127.0.0.1:8000".
        api_key: Sent as a bearer token; hidden in every message.
        request_timeout: Seconds for one attempt, from the connection to the last byte.
        max_retries: Attempts after the first.
        remote_api: The server is out in the world: proxies are those of the environment (as httpx and OpenAI's client
            have them), and redirects are followed. A proxy is not asked about the machine next door.
        headers: Sent with every request.

    Raises:
        UsageError: no plain http(s) address, limits or a key that cannot be used,
            a proxy that is no HTTP proxy, or the extra `api` is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        request_timeout: float,
        max_retries: int,
        remote_api: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = weakref.WeakKeyDictionary()
        check_address(url, "url")
        check_limits(request_timeout, max_retries)
        check_key(api_key)
        hide(api_key)
        refuse_without("aiohttp", "certifi", "orjson", extra="api", what="a request to a server")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._remote_api = remote_api
        self._proxy = proxy_of_environment(self.url) if remote_api else None
        self._secrets = [
            secret
            for secret in (api_key, self._proxy and urlsplit(self._proxy).password)
            if secret and len(secret) >= _SHORTEST_SECRET
        ]
        self._request_timeout = request_timeout
        self._max_retries = max_retries
        self._closed = False
        self._warned = False  # of the first connection that failed
        self._random = random.Random()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loops": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _loops=weakref.WeakKeyDictionary())

    def __del__(self) -> None:
        self._drop_ended_loops()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        read: Callable[[HttpResponse], T],
        failures: Counter[str] | None = None,
    ) -> T:
        """Send a request until it is answered. Cancelling the call closes its connection.

        Args:
            method: "GET" or "POST".
            path: "/v1/models".
            body: JSON.
            read: Makes the result of an answer, or raises `AttemptFailed`; other exceptions are passed on.
            failures: Every failed attempt is counted here as it happens, by its kind.

        Raises:
            SamplerFault: a final failure, or one more than `max_retries`; says how the last attempt failed.
            ClientClosed: `close` or `hang_up` was called meanwhile.
        """
        under_way = self._of_this_loop().under_way
        task = asyncio.create_task(self._ask(method, path, body, read, Counter() if failures is None else failures))
        under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ClientClosed(f"{self.url}: the connection was closed here before the server had answered") from None
        finally:
            under_way.discard(task)

    async def close(self) -> None:
        """No more requests; those under way in this event loop end as `ClientClosed`."""
        self._closed = True
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close this event loop's connections; requests under way end as `ClientClosed`, later ones connect anew."""
        state = self._loops.pop(asyncio.get_running_loop(), None)
        if state is not None:
            await cancel_all(state.under_way)
            await state.session.close()

    async def _ask(
        self, method: str, path: str, body: bytes | None, read: Callable[[HttpResponse], T], failures: Counter[str]
    ) -> T:
        for attempt in itertools.count(1):
            try:
                return read(await self._attempt(method, path, body))
            except AttemptFailed as failure:
                failures[failure.kind] += 1
                said = f"{self.url}: {self._hide(failure.text)}"
                if failure.final or attempt > self._max_retries:
                    tries = f" ({attempt} tries)" if attempt > 1 else ""
                    raise SamplerFault(said + tries) from None
                seconds = pause(attempt - 1, failure.retry_after, self._random)
                is_news = self._remote_api and failure.kind == "connection" and not self._warned
            self._warned = self._warned or is_news
            logger.log(
                logging.WARNING if is_news else logging.DEBUG,
                "%s; again in %.1f s, at most %d times in all",
                said,
                seconds,
                self._max_retries,
            )
            await asyncio.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, method: str, path: str, body: bytes | None) -> HttpResponse:
        import aiohttp

        state = self._of_this_loop()
        async with state.slots:
            request = state.session.request(method, self.url + path, data=body, allow_redirects=self._remote_api)
            try:
                async with asyncio.timeout(self._request_timeout), request as response:
                    return HttpResponse(path, response.status, await _read_body(response), response.headers)
            except aiohttp.ClientConnectorCertificateError as error:
                raise AttemptFailed("certificate", untrusted(error.certificate_error), final=True) from None
            except aiohttp.ClientError as error:  # no connection within CONNECT, too
                raise AttemptFailed("connection", f"Connection error ({type(error).__name__}: {error})") from None
            except TimeoutError:
                raise AttemptFailed("timeout", f"no answer within {self._request_timeout:g} s") from None

    def _of_this_loop(self) -> _LoopState:
        """Connections live in one event loop each."""
        if self._closed:
            raise SamplerFault(f"the connections to {self.url} were closed; make a new client")
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._drop_ended_loops()
            self._loops[loop] = _LoopState(self._open_session())
        return self._loops[loop]

    def _open_session(self) -> aiohttp.ClientSession:
        """Connections to the server, opened when they are needed, without cookies."""
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE, ssl=certificates() if self.url.startswith("https") else True
            ),
            headers=self._headers,
            proxy=self._proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        )

    def _drop_ended_loops(self) -> None:
        """A session holds on to its loop, so both would stay for ever."""
        for loop in [loop for loop in list(self._loops) if loop.is_closed()]:
            with contextlib.suppress(StopIteration):
                self._loops.pop(loop).session.close().send(None)  # without its loop, `close` has nothing to wait for

    def _hide(self, text: str) -> str:
        """Servers quote the key that they refuse; a quote may end in the middle of it."""
        for secret in self._secrets:
            for end in range(len(secret), _SHORTEST_SECRET - 1, -1):
                text = text.replace(secret[:end], REDACTED)
        return text


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON, integer arrays as lists; floats have to be finite. 32,768 ids take 0.2 ms.

    >>> encode({"ids": np.array([1, 2], dtype=np.int32)})
    b'{"ids":[1,2]}'
    """
    import orjson

    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # half a surrogate pair, an integer beyond 64 bits, an array that is not contiguous
        return json.dumps(body, default=lambda array: array.tolist(), allow_nan=False).encode()


def decode(answer: HttpResponse) -> Any:
    """The JSON of a body; floats are the nearest to what is written, so a float32 comes back bit for bit.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    import orjson

    with contextlib.suppress(ValueError):  # Python's reader takes more: half a surrogate pair, NaN, huge integers
        return orjson.loads(answer.body)
    try:
        return json.loads(answer.text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def read_json(answer: HttpResponse, hint: str = "") -> Any:
    """The JSON of a successful answer; `hint` is what people are told beside a failure.

    Raises:
        AttemptFailed: another status, or a body that is no JSON.
    """
    if answer.status != 200:
        raise status_failure(answer, hint)
    try:
        return decode(answer)
    except ValueError:
        raise AttemptFailed("bad_answer", f"an answer that is no JSON: {answer.text[:200]!r}") from None


def status_failure(answer: HttpResponse, hint: str = "") -> AttemptFailed:
    """An answer that is no success; `hint` is what people are told beside it."""
    wait = _retry_after(answer.headers.get("Retry-After"))
    said = " ".join(answer.text[:300].split())
    text = f"status {answer.status}: {said}" if said else f"status {answer.status}"
    if answer.status == 404:
        text = f"{answer.path}: {text}"
    if wait > LONGEST_RETRY_AFTER:
        text += f" (it asks to wait {wait:g} s; at most {LONGEST_RETRY_AFTER:g} are waited)"
    passing = (answer.status in _PASSING or answer.status >= 500) and wait <= LONGEST_RETRY_AFTER
    return AttemptFailed(f"status_{answer.status}", text + hint, retry_after=wait, final=not passing)


def pause(attempt: int, retry_after: float, jitter: random.Random) -> float:
    """Seconds before the next attempt: never the same for two requests, and not before the server wants it.

    >>> pause(0, 0.0, random.Random(0)), pause(3, 7.0, random.Random(0))
    (0.6722109257665487, 12.37768740613239)
    """
    return float(retry_after + min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * jitter.uniform(0.5, 1.5))


def _retry_after(header: str | None) -> float:
    """Seconds, or a date; neither is the usual pause."""
    for read in (float, lambda date: email.utils.parsedate_to_datetime(date).timestamp() - time.time()):
        with contextlib.suppress(ValueError):
            return max(0.0, read(header or ""))
    return 0.0


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """The decompressed body, given up as soon as it is too large."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise AttemptFailed("bad_answer", f"an answer of more than {MAX_ANSWER_BYTES:,} bytes", final=True)
    return b"".join(chunks)
