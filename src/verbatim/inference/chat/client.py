"""Requests chat completions of an OpenAI-compatible server, with retries and counts; defines the server's settings."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.texts import shown
from verbatim.inference.chat.answer import BadAnswer, ChatAnswer, read_answer
from verbatim.inference.http.client import AttemptFailed, HttpClient, HttpResponse, status_failure
from verbatim.inference.http.connection_settings import (
    OPENAI_HOST,
    OPENAI_KEY,
    account_headers,
    check_address,
    check_limits,
    key_variable,
    named_key,
)


@dataclass(frozen=True, kw_only=True)
class OpenAI:
    """Which model of which server, and how patiently it is asked. Does not connect by itself.

    Raises:
        UsageError: no name of a model, a `base_url` that is no plain http(s) address, or limits with which no request
            could be made.
    """

    model: str
    """The model's name on that server."""
    base_url: str = "https://api.openai.com/v1"
    """Up to where `/chat/completions` follows: "http://localhost:8000/v1"."""
    api_key: str | None = field(default=None, repr=False)
    """None takes it from the environment variable `api_key_env`."""
    api_key_env: str | None = None
    """Names that variable. None = OPENAI_API_KEY, and for OpenAI's own server only: another one is sent no key that is
    not named."""
    request_timeout: float = 600.0
    """Seconds for one try, from the connection to the last byte."""
    max_retries: int = 5
    """Tries after the first."""
    processed_logprobs: bool = False
    """Whether the server's logprobs are of the distribution that it samples from (vLLM started with
    `--logprobs-mode processed_logprobs`). Where they are of the model's own distribution they are recorded only for
    requests that sample from just that: temperature 1, nothing cut off."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise UsageError(f'model: found {shown(self.model, 80)}, expected its name on the server, as in "gpt-5"')
        check_address(self.base_url, "base_url")
        check_limits(self.request_timeout, self.max_retries)

    def check_key(self) -> None:
        """Look for the key before anything is asked.

        Raises:
            UsageError: the variable of `api_key_env` is empty; for OpenAI's own server also OPENAI_API_KEY.
        """
        variable = key_variable(self.base_url, self.api_key_env)
        if self.api_key is None and named_key(self.base_url, self.api_key_env) is None and variable is not None:
            raise UsageError(
                f"the environment variable {variable} is empty, and {self.base_url} needs a key; export "
                "it, or name the variable that holds it: api_key_env, --api-key-env"
            )

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[ChatConnection]:
        """Connections for as long as the block lasts, all on the running event loop.

        Raises:
            UsageError: the extra `api` is not installed, the variable of `api_key_env` is empty, or the environment
                names a proxy that is no HTTP proxy.
        """
        connection = self.open()
        try:
            yield connection
        finally:
            await connection.close()

    def open(self) -> ChatConnection:
        """Connections that are made when they are needed, in every event loop that asks; the caller closes them.

        Raises:
            UsageError: as `connect`.
        """
        key = self.api_key or named_key(self.base_url, self.api_key_env)
        client = HttpClient(
            self.base_url,
            api_key=key,
            request_timeout=self.request_timeout,
            max_retries=self.max_retries,
            headers=account_headers(self.base_url),
            remote_api=True,
        )
        return ChatConnection(self, client, has_key=key is not None)


class ChatConnection:
    """An open way to the server. Requests may be made concurrently."""

    def __init__(self, api: OpenAI, client: HttpClient, *, has_key: bool) -> None:
        self.api = api
        self._client = client
        self._has_key = has_key

    async def close(self) -> None:
        """End the connections of this event loop; no more requests."""
        await self._client.close()

    async def hang_up(self) -> None:
        """End the connections of this event loop; later requests connect anew."""
        await self._client.hang_up()

    async def complete(self, body: Mapping[str, Any], failures: Counter[str]) -> ChatAnswer:
        """Send a request until it is answered.

        Args:
            body: As `chat.request.chat_body` makes it.
            failures: What went wrong is counted here as it happens: "status_500", "connection", "timeout",
                "bad_answer", "unsendable".

        Raises:
            SamplerFault: refused, or failed once more than `max_retries` times; says how.
        """
        try:
            data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            failures["unsendable"] += 1
            raise SamplerFault(f"{self.api.base_url}: the request cannot be written as JSON: {error}") from None
        return await self._client.ask("POST", "/chat/completions", data, self._read, failures)

    def _read(self, answer: HttpResponse) -> ChatAnswer:
        if not 200 <= answer.status < 300:
            raise status_failure(answer, self._hint(answer.status))
        try:
            return read_answer(answer.text)
        except BadAnswer as error:
            raise AttemptFailed("bad_answer", str(error)) from None

    def _hint(self, status: int) -> str:
        """The most common mistakes, where a server says no more than a status."""
        if status == 401 and not self._has_key:
            variable = key_variable(self.api.base_url, self.api.api_key_env)
            if variable is not None:
                return f" (no key was sent: the environment variable {variable} is empty)"
            return (
                f" (no key was sent: {OPENAI_KEY} is for {OPENAI_HOST} only; for this server name the variable "
                "that holds its key: api_key_env, on the command line --api-key-env)"
            )
        if status == 404 and not self._client.url.endswith("/v1"):
            return ' (most base_urls end with "/v1")'
        return ""
