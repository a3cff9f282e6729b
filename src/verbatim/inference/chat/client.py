"""A client for the chat completions of an OpenAI-compatible server, and the client's settings. The client retries
failed requests and counts failures."""

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
    """Settings for a model on an OpenAI-compatible server. Creating them opens no connection.

    Raises:
        UsageError: the model name is missing, `base_url` is not an http(s) address, or a limit is out of range.
    """

    model: str
    """The model's name on the server."""
    base_url: str = "https://api.openai.com/v1"
    """Base address, without `/chat/completions`: "http://localhost:8000/v1"."""
    api_key: str | None = field(default=None, repr=False)
    """The API key; None to read it from the environment variable named by `api_key_env`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key. If None, OPENAI_API_KEY is used, but only for OpenAI's own
    server, so that this key is never sent elsewhere."""
    request_timeout: float = 600.0
    """Timeout of one attempt in seconds, from connecting to the last byte."""
    max_retries: int = 5
    """Maximum number of further attempts after the first fails."""
    processed_logprobs: bool = False
    """True if the server returns logprobs of the distribution that it samples from (vLLM started with `--logprobs-mode
    processed_logprobs`). Otherwise the logprobs are assumed to refer to the model's own distribution, and are recorded
    only for requests that sample from that distribution (temperature 1, no truncation)."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise UsageError(f'model: found {shown(self.model, 80)}, expected its name on the server, as in "gpt-5"')
        check_address(self.base_url, "base_url")
        check_limits(self.request_timeout, self.max_retries)

    def check_key(self) -> None:
        """Check before the first request that an API key is set.

        Raises:
            UsageError: the variable named by `api_key_env` is empty; or `api_key_env` is None, the server is OpenAI's
                own, and OPENAI_API_KEY is empty.
        """
        variable = key_variable(self.base_url, self.api_key_env)
        if self.api_key is None and named_key(self.base_url, self.api_key_env) is None and variable is not None:
            raise UsageError(
                f"the environment variable {variable} is empty, and {self.base_url} needs a key; export "
                "it, or set api_key_env (--api-key-env) to the variable that holds it"
            )

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[ChatConnection]:
        """Open a connection for the running event loop, and close it at the end of the block.

        Raises:
            UsageError: the extra `api` is not installed, the variable named by `api_key_env` is empty, or the proxy set
                in the environment is not an HTTP proxy.
        """
        connection = self.open()
        try:
            yield connection
        finally:
            await connection.close()

    def open(self) -> ChatConnection:
        """Make a `ChatConnection`, which the caller has to close. It opens sockets on demand and works in several event
        loops.

        Raises:
            UsageError: see `connect`.
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
    """A client for one model on one server. Requests may be made concurrently."""

    def __init__(self, api: OpenAI, client: HttpClient, *, has_key: bool) -> None:
        self.api = api
        self._client = client
        self._has_key = has_key

    async def close(self) -> None:
        """Close the connections of this event loop. The client cannot be used afterwards."""
        await self._client.close()

    async def hang_up(self) -> None:
        """Close the connections of this event loop; later requests reconnect."""
        await self._client.hang_up()

    async def complete(self, body: Mapping[str, Any], failures: Counter[str]) -> ChatAnswer:
        """Send a request, with retries.

        Args:
            body: The request, from `chat.request.chat_body`.
            failures: Counts failed attempts as they happen, by kind: "status_500", "connection", "timeout",
                "bad_answer", "unsendable".

        Raises:
            SamplerFault: the request was refused, or more than `max_retries` attempts failed; the message gives the
                reason.
        """
        try:
            data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
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
        """A hint at the most common cause of an HTTP status. Some servers return nothing but the status."""
        if status == 401 and not self._has_key:
            variable = key_variable(self.api.base_url, self.api.api_key_env)
            if variable is not None:
                return f" (no key was sent: the environment variable {variable} is empty)"
            return (
                f" (no key was sent: {OPENAI_KEY} is used for {OPENAI_HOST} only; for this server set api_key_env "
                "(--api-key-env) to the variable that holds its key)"
            )
        if status == 404 and not self._client.url.endswith("/v1"):
            return ' (most base_urls end with "/v1")'
        return ""
