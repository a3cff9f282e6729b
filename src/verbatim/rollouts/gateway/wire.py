"""Reads the headers of requests to the gateway, and converts errors to responses."""

from __future__ import annotations

import logging

from starlette.requests import Request

from verbatim.core.errors import EngineDead, RolloutError, SamplerFault, TemplateFault, UsageError
from verbatim.core.texts import cut, error_text
from verbatim.inference.http.refused import Refused
from verbatim.rollouts.gateway.exchanges import OtherRequest, SessionEnded

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 2000


def headers_of(request: Request) -> dict[str, str]:
    """Return the headers, keyed by lower-case name. Values that are not UTF-8 are decoded as Latin-1. This is the older
    encoding of headers, and `fetch` and the package `requests` still use it."""
    return {name.decode("latin-1"): _readable(value) for name, value in request.headers.raw}


def _readable(value: bytes) -> str:
    r"""Decode a header's value.

    >>> _readable(b"Zo\xeb"), _readable("Zoë".encode())
    ('Zoë', 'Zoë')
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def told(error: Exception) -> Refused:
    """Convert an error to the response that the client gets. Unexpected errors are logged."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OtherRequest):
        return Refused(422, "this idempotency key was used for a different request before", "idempotency_key_reused")
    if isinstance(error, SessionEnded):
        return Refused(503, "the session is over", "session_over")
    if isinstance(error, (SamplerFault, EngineDead)):
        return Refused(500, f"the sampler failed: {error}", "sampler_failed")
    if isinstance(error, (UsageError, RolloutError, TemplateFault)):
        return Refused(400, cut(str(error), _LONGEST_MESSAGE))
    logger.error("a request to the gateway failed", exc_info=error)
    return Refused(500, f"the gateway failed: {error_text(error, 200)}", "gateway_failed")
