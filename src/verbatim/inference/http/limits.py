"""Defines the limits of a server: connections, seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.sampling import MOST_STOP_IDS

_BYTES_OF_AN_ID = 32
"""Maximum bytes of one token id in JSON: ten digits, a comma, and indentation."""
BYTES_OF_A_TOKEN = 256
"""Maximum bytes of one token's text. The longest tokens in published vocabularies are 128 spaces."""
_OVERHEAD = 256 * 2**10
"""Maximum bytes of a body that are neither ids nor text."""
_LARGEST_BODY = 64 * 2**20
"""Maximum bytes of any body, regardless of the context length."""

TINY_CHUNKS = "tiny_chunks"
"""Key in the ASGI state that is set if reading stopped because the chunks of the body are too small."""
DOOR, CONNECTION = "door", "connection"
"""Keys in the ASGI state of every request, for its door (or None) and its connection."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits that every HTTP server has."""

    max_connections: int = 4096
    """Maximum number of open connections; file descriptors may limit it further. When the limit is reached, a new
    connection replaces the connection that has been idle longest, or gets a 503 if no connection is idle."""
    head_bytes: int = 2**14
    """Maximum bytes of a request's head, including the empty line that ends it."""
    head_seconds: float = 15.0
    """Seconds within which a request's head must arrive, counted from connecting, or for later requests from the first
    byte."""
    body_seconds: float = 60.0
    """Seconds within which a request's body must arrive, counted from the end of its head."""
    answer_seconds: float = 60.0
    """Seconds after which the connection is closed if the client does not read its response."""
    refusal_seconds: float = 0.0
    """Seconds before a refusal is sent, to slow down clients that repeat invalid requests."""
    takes_chunks: bool = False
    """True if chunked bodies, which have no content-length, are accepted."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(ConnectionLimits):
    """Limits of a server that samples."""

    render_seconds: float = 10.0
    """Timeout in seconds for rendering a conversation to token ids."""
    max_body: int | None = None
    """Maximum bytes of a request's body; None for enough to fill the context."""

    def ids_body(self, context_length: int) -> int:
        """Maximum bytes of a request with token ids."""
        return self._at_most(_BYTES_OF_AN_ID * (context_length + MOST_STOP_IDS) + _OVERHEAD)

    def chat_body(self, context_length: int) -> int:
        """Maximum bytes of a chat request. This allows for twice the bytes of the text, because JSON escapes make some
        characters longer."""
        return self._at_most(2 * most_text(context_length) + _OVERHEAD)

    def upload_body(self) -> int:
        """Maximum bytes of one part of an uploaded file."""
        return self._at_most(_LARGEST_BODY)

    def small_body(self) -> int:
        """Maximum bytes of a request that has no token ids, no conversation and no part of an upload."""
        return self._at_most(_OVERHEAD)

    def _at_most(self, size: int) -> int:
        return min(size, _LARGEST_BODY) if self.max_body is None else self.max_body


def most_text(context_length: int) -> int:
    """Upper bound on the characters of text that fit into a context, for any tokenizer.

    >>> most_text(4096)
    1048576
    """
    return BYTES_OF_A_TOKEN * context_length
