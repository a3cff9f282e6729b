"""Writes server-sent events, and tracks what a stream has sent, so that its last events add exactly the rest."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.inference.chat.protocol import ChatDelta, ChatReply, TokenLogprob

PING = b": ping\n\n"
"""A comment in the event stream; clients ignore it."""


class StreamDiverged(ValueError):
    """The final reply does not begin with the text that was streamed."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Encode one event as ASCII, because text may contain lone surrogates, or Unicode line breaks at which some clients
    would split the line.

    >>> event({"a": 1}, "ping")
    b'event: ping\\ndata: {"a":1}\\n\\n'
    """
    text = json.dumps(data, separators=(",", ":"))
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode("ascii")


@dataclass
class StreamedReply:
    """What was streamed of one reply."""

    reasoning: str = ""
    content: str = ""
    num_tokens: int = 0
    """Number of tokens whose logprobs were sent."""

    def add(self, delta: ChatDelta) -> None:
        """Record a delta that was sent."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.num_tokens += len(delta.tokens)

    def rest(self, reply: ChatReply, index: int = 0) -> ChatDelta:
        """The part of a reply that has not been streamed yet.

        Raises:
            StreamDiverged: the reply does not begin with what was streamed.
        """
        reasoning = reply.reasoning_content or ""
        if not (reasoning.startswith(self.reasoning) and reply.content.startswith(self.content)):
            raise StreamDiverged("the reply does not begin with the text that was streamed")
        return ChatDelta(
            index=index,
            reasoning=reasoning[len(self.reasoning) :],
            content=reply.content[len(self.content) :],
            tokens=token_logprobs(reply)[self.num_tokens :],
        )


class BlockStream(ABC):
    """Base class of streams that send a reply in blocks. Each block is started, grows, and is closed."""

    ping = PING

    def __init__(self) -> None:
        self._said = StreamedReply()
        self._open = ""
        """Kind of the open block: "thinking", "text" or a kind of the subclass; "" if no block is open."""

    def delta(self, delta: ChatDelta) -> bytes:
        """The events for a delta: thinking, then text."""
        return b"".join(self._texts(delta))

    def _texts(self, delta: ChatDelta) -> list[bytes]:
        self._said.add(delta)
        events: list[bytes] = []
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text and self._open != kind:
                assert not (self._open and kind == "thinking"), "thinking comes before text"
                events += [*self._close("completed"), *self._start(kind)]
            if text:
                events.append(self._grown(kind, text))
        return events

    @abstractmethod
    def _start(self, kind: str) -> list[bytes]:
        """Start a block."""

    @abstractmethod
    def _grown(self, kind: str, text: str) -> bytes:
        """The event for new text in the open block."""

    @abstractmethod
    def _close(self, status: str) -> list[bytes]:
        """Close the open block, if there is one; `status` is "completed" or "incomplete"."""


def token_logprobs(reply: ChatReply) -> tuple[TokenLogprob, ...]:
    """The tokens of a reply with their logprobs; empty if the reply has no logprobs or no token texts."""
    if reply.logprobs is None or not reply.token_texts:
        return ()
    pairs = zip(reply.token_texts, reply.logprobs.tolist(), strict=True)
    return tuple(TokenLogprob(text=text, logprob=logprob) for text, logprob in pairs)
