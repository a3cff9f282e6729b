"""Reads and compares the key of a request. Shared by Verbatim's own servers and by vLLM's servers, where Verbatim is
not installed."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]
"""Headers as in ASGI: names in lower case."""


def bearer_of(headers: Headers) -> bytes | None:
    """The key in `Authorization: Bearer KEY`, or None if the header is missing, repeated or of another scheme. The
    scheme's name is case-insensitive (RFC 9110); a value without a scheme is not a key.

    >>> bearer_of([(b"authorization", b"bearer k")]), bearer_of([(b"authorization", b"k")])
    (b'k', None)
    """
    # Two headers are ambiguous, so they are treated like a missing header.
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, key = given[0].strip().partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def key_of(headers: Headers, *others: bytes) -> bytes | None:
    """The key of a request: its bearer token, or else the value of the first header in `others` that the request has.

    >>> key_of([(b"x-api-key", b"k")], b"x-api-key")
    b'k'
    """
    headers = list(headers)
    found = bearer_of(headers)
    if found is not None:
        return found
    return next((value for other in others for name, value in headers if name == other and value), None)


def is_key(given: bytes | None, key: bytes) -> bool:
    """True if the key is right. The comparison takes constant time, so that timing does not reveal the key."""
    return hmac.compare_digest(given or b"", key) and given is not None
