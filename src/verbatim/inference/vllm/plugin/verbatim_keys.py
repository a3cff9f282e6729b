"""Reads the key of a request, and compares it: for every server of ours, and for vLLM's, in whose processes Verbatim is
not installed."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""


def bearer_of(headers: Headers) -> bytes | None:
    """The key of `Authorization: Bearer KEY`; None where there is no such header, another scheme, or two of them. The
    name of the scheme may be in any case (RFC 9110); a key without a scheme is none.

    >>> bearer_of([(b"authorization", b"bearer k")]), bearer_of([(b"authorization", b"k")])
    (b'k', None)
    """
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, key = given[0].strip().partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def key_of(headers: Headers, *others: bytes) -> bytes | None:
    """The key of a request: a bearer token, or else the value of the first of these headers that it has.

    >>> key_of([(b"x-api-key", b"k")], b"x-api-key")
    b'k'
    """
    headers = list(headers)
    found = bearer_of(headers)
    if found is not None:
        return found
    return next((value for other in others for name, value in headers if name == other and value), None)


def is_key(given: bytes | None, key: bytes) -> bool:
    """Whether a key is the right one, in a time that does not say how much of it is."""
    return hmac.compare_digest(given or b"", key) and given is not None
