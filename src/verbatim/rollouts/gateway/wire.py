"""Reads the bodies and headers of requests to the gateway, and writes its answers and errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import EngineDead, RolloutError, SamplerFault, TemplateFault, UsageError
from verbatim.core.texts import cut, error_text
from verbatim.inference.chat.protocol import ChatProtocol
from verbatim.inference.http.json_text import read_value
from verbatim.inference.http.limits import CONNECTION
from verbatim.inference.http.lone_surrogates import find_lone_surrogate
from verbatim.rollouts.gateway.exchanges import Ended, OtherRequest
from verbatim.rollouts.gateway.session_settings import SessionRefusal

try:
    from starlette.requests import Request
    from starlette.types import Scope, Send
except ImportError as error:
    raise UsageError(f"the gateway needs {error.name}: pip install 'verbatim-rl[gateway]'") from None

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 2000


def read_body(body: bytes | bytearray, most_values: int) -> Any:
    """The JSON value of a body of at most so many values.

    Raises:
        SessionRefusal: it is no JSON, has too many values or levels or a key twice, or holds half a character.
    """
    given = _read_json(body, most_values)
    broken = find_lone_surrogate(given)
    if broken is not None:
        raise SessionRefusal(400, broken.sentence)
    return given


def _read_json(body: bytes | bytearray, most_values: int) -> Any:
    try:
        return read_value(body, most_values)
    except UsageError as error:
        raise SessionRefusal(400, str(error)) from None


def read_object(body: bytes | bytearray, most_values: int) -> dict[str, Any]:
    """The JSON object of a body. Texts may hold half a character, which their reader refuses by the field.

    Raises:
        SessionRefusal: it is no JSON object, or has too many values or levels, or a key twice.
    """
    given = _read_json(body, most_values)
    if not isinstance(given, dict):
        raise SessionRefusal(400, "expected a JSON object as the body")
    return given


def headers_of(request: Request) -> dict[str, str]:
    """The headers by lower-case name, as texts that can be written. Bytes that are no UTF-8 are read as Latin-1, the
    older encoding of headers, which `fetch` and requests send."""
    return {name.decode("latin-1"): _readable(value) for name, value in request.headers.raw}


def _readable(value: bytes) -> str:
    r"""A header's text.

    >>> _readable(b"Zo\xeb"), _readable("Zoë".encode())
    ('Zoë', 'Zoë')
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class Reply:
    """Writes the answer to one request.

    Args:
        scope, send: Of ASGI.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._connection = scope.get("state", {}).get(CONNECTION)
        self._send = send
        self.has_begun = self.has_ended = False

    async def whole(self, status: int, body: Mapping[str, Any], **headers: str) -> None:
        """Write all of it, in ASCII: texts may hold lone surrogates.

        Raises:
            ConnectionError: the client has gone.
        """
        data = json.dumps(body).encode("ascii")
        await self._begin(status, {"content-type": "application/json", "content-length": str(len(data)), **headers})
        await self._write(data, last=True)

    async def event(self, event: bytes) -> None:
        """Write a part of a stream; a ConnectionError if the client has gone."""
        if not self.has_begun:
            await self._begin(200, {"content-type": "text/event-stream", "cache-control": "no-cache"})
        await self._write(event)

    async def end(self) -> None:
        """The stream is over; a ConnectionError if the client has gone."""
        await self._write(b"", last=True)

    async def error(self, protocol: ChatProtocol, status: int, message: str, kind: str = "") -> None:
        """An error in the form of a protocol; a ConnectionError if the client has gone."""
        await self.whole(status, protocol.error(status, message, kind=kind))

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._check()
        self.has_begun = True
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self._check()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.has_ended = last

    def _check(self) -> None:
        if self._connection is not None and self._connection.is_gone:
            raise ConnectionResetError("the client has closed its connection")


def told(error: Exception) -> tuple[int, str, str]:
    """Status, message and code of an error. What is a mistake of ours is logged."""
    if isinstance(error, SessionRefusal):
        return error.status, str(error), error.kind
    if isinstance(error, OtherRequest):
        return 422, "this idempotency key came with another request before", "idempotency_key_reused"
    if isinstance(error, Ended):
        return 503, "the session is over", "session_over"
    if isinstance(error, (SamplerFault, EngineDead)):
        return 500, f"the sampler failed: {error}", "sampler_failed"
    if isinstance(error, (UsageError, RolloutError, TemplateFault)):
        return 400, cut(str(error), _LONGEST_MESSAGE), ""
    logger.error("a request to the gateway failed", exc_info=error)
    return 500, f"the gateway failed: {error_text(error, 200)}", "gateway_failed"
