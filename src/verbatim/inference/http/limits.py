"""Defines the limits of one client of a server: connections, seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.sampling import MOST_STOP_IDS

_BYTES_OF_AN_ID = 32
"""Most bytes of an id in JSON: ten digits, and spaces around them."""
BYTES_OF_A_TOKEN = 256
"""Most bytes of one token's text: the longest in published vocabularies are 128 spaces."""
_BESIDE = 256 * 2**10
"""Most bytes of a body beside ids and text."""
_LARGEST_BODY = 64 * 2**20


TINY_CHUNKS = "tiny_chunks"
"""In the state of a request whose chunks are too small to be read on."""
DOOR, CONNECTION = "door", "connection"
"""In the state of every request: the door that it came through, or None, and its connection."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits that all servers have."""

    max_connections: int = 4096
    """Most open connections, and never more than there are descriptors for. A new one replaces the connection that has
    waited longest for a request; if all have one, it is answered with 503."""
    head_bytes: int = 2**14
    """Most bytes of the head of a request, with the empty line that ends it."""
    head_seconds: float = 15.0
    """Seconds for the head of a request, from the connection or its first byte."""
    body_seconds: float = 60.0
    """Seconds for the body of a request, from the end of its head."""
    answer_seconds: float = 60.0
    """Seconds for which a client may leave its answer unread."""
    refusal_seconds: float = 0.0
    """Seconds before a refusal is sent, so that a client that repeats an invalid request costs less."""
    takes_chunks: bool = False
    """Whether a body may come in chunks, without saying its length."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits(ConnectionLimits):
    """Limits of one client of a sampler's server."""

    render_seconds: float = 10.0
    """Seconds to render a conversation to token ids."""
    max_body: int | None = None
    """Most bytes of a request; None: what a full context can need."""

    def ids_body(self, context_length: int) -> int:
        """Most bytes of a request that brings token ids."""
        return self._at_most(_BYTES_OF_AN_ID * (context_length + MOST_STOP_IDS) + _BESIDE)

    def chat_body(self, context_length: int) -> int:
        """Most bytes of a request that brings a conversation: its text twice, as JSON writes some characters longer."""
        return self._at_most(2 * most_text(context_length) + _BESIDE)

    def upload_body(self) -> int:
        """Most bytes of a part of an uploaded file."""
        return self._at_most(_LARGEST_BODY)

    def small_body(self) -> int:
        """Most bytes of any other request."""
        return self._at_most(_BESIDE)

    def _at_most(self, size: int) -> int:
        return min(size, _LARGEST_BODY) if self.max_body is None else self.max_body


def most_text(context_length: int) -> int:
    """Most characters of text that fit into a context, with any tokenizer.

    >>> most_text(4096)
    1048576
    """
    return BYTES_OF_A_TOKEN * context_length
