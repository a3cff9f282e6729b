"""Reads the bodies and headers of requests to the gateway, and writes its answers and errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from verbatim.errors import EngineDead, RolloutError, SamplerFault, TemplateFault, UsageError
from verbatim.gateway.exchanges import Ended, OtherRequest
from verbatim.gateway.session_settings import SessionRefusal
from verbatim.inference.chat.protocol import ChatProtocol
from verbatim.texts import cut, error_text

try:
    import orjson
    from aiohttp import web
except ImportError as error:
    raise UsageError(f"the gateway needs {error.name}: pip install 'verbatim-rl[gateway]'") from None

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 2000


def read_body(body: bytes) -> Any:
    """The JSON value of a body.

    Raises:
        SessionRefusal: it is no JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise SessionRefusal(400, f"the body is no JSON: {error}") from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        SessionRefusal: the body is not a JSON object.
    """
    given = read_body(body)
    if not isinstance(given, dict):
        raise SessionRefusal(400, "expected a JSON object as the body")
    return given


def headers_of(request: web.Request) -> dict[str, str]:
    """The headers by lower-case name, as texts that can be written. Bytes that are no UTF-8 are read as Latin-1, the
    older encoding of headers, which `fetch` and requests send."""
    return {name.lower(): _readable(value) for name, value in request.headers.items()}


def _readable(value: str) -> str:
    """A header's text; aiohttp marks the bytes that are no UTF-8 by surrogates.

    >>> _readable("Zo\\udceb"), _readable("Zoë")
    ('Zoë', 'Zoë')
    """
    try:
        value.encode()
        return value
    except UnicodeEncodeError:
        return value.encode(errors="surrogateescape").decode("latin-1")


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


def error_response(protocol: ChatProtocol, status: int, message: str, kind: str = "") -> web.Response:
    """An error in the form of a protocol."""
    return json_response(status, protocol.error(status, message, kind=kind))


def json_response(status: int, body: Mapping[str, Any]) -> web.Response:
    """In ASCII: texts may hold lone surrogates."""
    return web.Response(status=status, body=json.dumps(body).encode("ascii"), content_type="application/json")
