"""An OpenAI-compatible chat-completions server, reached through the official client: patient, bounded, discreet.

Patient: what may pass (429, 5xx, a lost connection, a deadline, a broken body) is tried again after a growing pause.
Bounded: by a deadline for each try and a number of tries. Discreet: the key stands in no record, text or log of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from verbatim.errors import SamplerFault, UsageError
from verbatim.inference.chat.answer import BadAnswer, ChatAnswer, read_answer

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Seconds after the first failure; doubled after each further one, give or take a half."""
LONGEST_PAUSE = 30.0
"""Seconds; what it is doubled up to."""
LONGEST_RETRY_AFTER = 120.0
"""Seconds that a server may ask to wait; one that asks for more has failed for good."""
_PASSING = {408, 409, 425, 429}
_NO_KEY = "none"
"""Sent where there is none: the client insists on one."""
_SHORTEST_SECRET = 8
"""Characters. Shorter keys ("EMPTY", "none") hide nothing, and would be found inside ordinary words."""


@dataclass(frozen=True, kw_only=True)
class OpenAI:
    """Which model of which server, and how much patience it is met with. Connects to nothing by itself.

    Raises:
        UsageError: a `base_url` that is no plain http(s) address.
    """

    model: str
    """The model's name on that server."""
    base_url: str = "https://api.openai.com/v1"
    """Up to where `/chat/completions` follows: "http://localhost:8000/v1"."""
    api_key: str | None = field(default=None, repr=False)
    """None takes it from the environment variable `api_key_env`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Names that variable; a server without keys needs none."""
    request_timeout: float = 600.0
    """Seconds for one try, from the connection to the last byte."""
    max_retries: int = 5
    """Tries after the first."""
    processed_logprobs: bool = False
    """Whether the server's logprobs are of the distribution that it samples from (vLLM started with
    `--logprobs-mode processed_logprobs`). Where they are of the model's own distribution they are recorded only for
    requests that sample from just that: temperature 1, nothing cut off."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"base_url {self.base_url.rpartition('@')[2]!r}; expected an address such as "
                             '"http://localhost:8000/v1"')  # fmt: skip
        if "@" in parts.netloc or parts.query:
            raise UsageError(f"base_url of {parts.hostname} holds a password or a query, which would be written down; "
                             f"give the key as api_key, or in the environment variable {self.api_key_env}")  # fmt: skip
        if self.max_retries < 0 or self.request_timeout <= 0:
            raise UsageError(f"max_retries = {self.max_retries}, request_timeout = {self.request_timeout}; expected "
                             "at least 0 retries and a time above 0")  # fmt: skip

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Connections for as long as the block lasts, all on the running event loop.

        Raises:
            UsageError: the `openai` package is not installed.
        """
        try:
            import openai
        except ImportError:
            raise UsageError("chat completions need openai's client: pip install 'verbatim-rl[api]'") from None
        key = self.api_key or os.environ.get(self.api_key_env) or _NO_KEY
        # Deadlines and tries are counted here, where they can be told apart; the client's own would hide them.
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=key, timeout=None, max_retries=0) as client:
            yield Connection(self, client, key)


class Connection:
    """An open way to the server. Requests may be made concurrently."""

    def __init__(self, api: OpenAI, client: Any, key: str) -> None:
        self.api = api
        self._client = client
        self._key = key
        self._jitter = random.Random()

    async def complete(self, body: Mapping[str, Any], failures: Counter[str]) -> ChatAnswer:
        """Send a request until it is answered.

        Args:
            body: As `chat_request.chat_body` makes it.
            failures: What went wrong is counted here as it happens: "status_500", "connection", "timeout",
                "bad_answer", "unsendable".

        Raises:
            SamplerFault: refused, or failed once more than `max_retries` times; says how.
        """
        for attempt in range(self.api.max_retries + 1):
            outcome = await self._try(body)
            if isinstance(outcome, ChatAnswer):
                return outcome
            failures[outcome.kind] += 1
            last = outcome.final or attempt == self.api.max_retries
            if last:
                tries = f" ({attempt + 1} tries)" if attempt else ""
                raise SamplerFault(f"{self.api.base_url}: {self._hide(outcome.text)}{tries}")
            seconds = pause(attempt, outcome.retry_after, self._jitter)
            logger.debug("%s: %s; again in %.1f s", self.api.base_url, self._hide(outcome.text), seconds)
            await asyncio.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    async def _try(self, body: Mapping[str, Any]) -> ChatAnswer | _Failure:
        import openai

        rest = {name: value for name, value in body.items() if name not in ("model", "messages")}
        completions = self._client.chat.completions.with_raw_response
        try:
            async with asyncio.timeout(self.api.request_timeout):
                answer = await completions.create(model=body["model"], messages=body["messages"], extra_body=rest)
        except TimeoutError:
            return _Failure("timeout", f"no answer within {self.api.request_timeout:g} s")
        except openai.APIStatusError as error:
            failure = _status_failure(error.status_code, text_of(error.response), error.response.headers)
            return replace(failure, text=failure.text + self._hint(error.status_code))
        except openai.APIConnectionError as error:
            return _Failure("connection", f"{error} ({type(error.__cause__).__name__}: {error.__cause__})")
        except (TypeError, ValueError) as error:  # of writing the request as JSON: no other try would mend it
            return _Failure("unsendable", f"the request cannot be written as JSON: {error}", final=True)
        try:
            return read_answer(text_of(answer.http_response))
        except BadAnswer as error:
            return _Failure("bad_answer", str(error))

    def _hint(self, status: int) -> str:
        """What people have most often forgotten, where a server says no more than this."""
        if status == 401 and self._key == _NO_KEY:
            return f" (no key was sent: the environment variable {self.api.api_key_env} is empty)"
        if status == 404 and not self.api.base_url.rstrip("/").endswith("/v1"):
            return ' (most base_urls end with "/v1")'
        return ""

    def _hide(self, text: str) -> str:
        """Servers quote the key that they refuse."""
        return text.replace(self._key, "[key]") if len(self._key) >= _SHORTEST_SECRET else text


@dataclass(frozen=True)
class _Failure:
    """One try that did not work."""

    kind: str
    """What is counted."""
    text: str
    """What people are told; may hold the key."""
    retry_after: float = 0.0
    """Seconds that the server asks to wait."""
    final: bool = False
    """Whether another try would be in vain."""


def text_of(response: Any) -> str:
    """An answer of httpx as text, whatever character set it says that it is in."""
    return bytes(response.content).decode("utf-8", "replace")


def _status_failure(status: int, body: str, headers: Mapping[str, str]) -> _Failure:
    wait = _retry_after(headers.get("retry-after"))
    said = " ".join(body[:300].split())
    text = f"status {status}: {said}" if said else f"status {status}"
    if wait > LONGEST_RETRY_AFTER:
        text += f" (it asks to wait {wait:g} s; at most {LONGEST_RETRY_AFTER:g} are waited)"
    passing = (status in _PASSING or status >= 500) and wait <= LONGEST_RETRY_AFTER
    return _Failure(f"status_{status}", text, retry_after=wait, final=not passing)


def _retry_after(header: str | None) -> float:
    """Seconds, or a date."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0  # neither: the usual pause


def pause(attempt: int, retry_after: float, jitter: random.Random) -> float:
    """Seconds before the next try: never the same for two requests, and not before the server wants it.

    >>> pause(0, 0.0, random.Random(0)), pause(3, 7.0, random.Random(0))
    (0.6722109257665487, 12.37768740613239)
    """
    return float(retry_after + min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * jitter.uniform(0.5, 1.5))
