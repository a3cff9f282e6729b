"""Defines a server's limits on its clients: connections, seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.sampling import MOST_STOP_IDS

_BYTES_OF_AN_ID = 32
"""Maximum bytes of one id in JSON: ten digits, a comma, and indentation."""
BYTES_OF_A_TOKEN = 256
"""Maximum bytes of one token's text: the longest tokens in published vocabularies are 128 spaces."""
_OVERHEAD = 256 * 2**10
"""Maximum bytes of a body in addition to ids and text."""
_LARGEST_BODY = 64 * 2**20
"""Upper limit in bytes for any body, however long the context is."""

TINY_CHUNKS = "tiny_chunks"
"""Key in the ASGI state: set if reading stopped because the body came in chunks that are too small."""
DOOR, CONNECTION = "door", "connection"
"""Keys in the ASGI state of every request: the door that it came through (or None), and its connection."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of every HTTP server."""

    max_connections: int = 4096
    """Maximum number of open connections; file descriptors may limit it further. When the limit is reached, a new
    connection replaces the one that has been idle longest; if none is idle, the new one gets a 503."""
    head_bytes: int = 2**14
    """Maximum bytes of a request's head, including the empty line that ends it."""
    head_seconds: float = 15.0
    """Seconds in which a request's head must arrive: from connecting, or for later requests from the first byte."""
    body_seconds: float = 60.0
    """Seconds in which a request's body must arrive, from the end of its head."""
    answer_seconds: float = 60.0
    """Seconds for which a client may leave its response unread before the connection is closed."""
    refusal_seconds: float = 0.0
    """Delay in seconds before a refusal is sent, to slow down clients that repeat invalid requests."""
    takes_chunks: bool = False
    """True if chunked bodies, which have no content-length, are accepted."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(ConnectionLimits):
    """Limits of a server that samples."""

    render_seconds: float = 10.0
    """Timeout in seconds for rendering a conversation to token ids."""
    max_body: int | None = None
    """Maximum bytes of a request's body; None: enough for a full context."""

    def ids_body(self, context_length: int) -> int:
        """Maximum bytes of a request with token ids."""
        return self._at_most(_BYTES_OF_AN_ID * (context_length + MOST_STOP_IDS) + _OVERHEAD)

    def chat_body(self, context_length: int) -> int:
        """Maximum bytes of a chat request: twice the text, because JSON escapes make some characters longer."""
        return self._at_most(2 * most_text(context_length) + _OVERHEAD)

    def upload_body(self) -> int:
        """Maximum bytes of one part of an uploaded file."""
        return self._at_most(_LARGEST_BODY)

    def small_body(self) -> int:
        """Maximum bytes of any other request."""
        return self._at_most(_OVERHEAD)

    def _at_most(self, size: int) -> int:
        return min(size, _LARGEST_BODY) if self.max_body is None else self.max_body


def most_text(context_length: int) -> int:
    """Upper bound on the characters of text that fit into a context, for any tokenizer.

    >>> most_text(4096)
    1048576
    """
    return BYTES_OF_A_TOKEN * context_length
