"""Writes server-sent events, and keeps what a stream has said so far, so that its end adds exactly the rest."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.inference.chat.protocol import ChatDelta, ChatReply, TokenLogprob

PING = b": ping\n\n"
"""A comment: clients pass over it."""


class StreamDiverged(ValueError):
    """What a stream has said is not how the reply begins."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event. In ASCII, since texts may hold half a surrogate pair or a line break that JSON does not escape.

    >>> event({"a": 1}, "ping")
    b'event: ping\\ndata: {"a":1}\\n\\n'
    """
    text = json.dumps(data, separators=(",", ":"))
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode("ascii")


@dataclass
class StreamedReply:
    """What a stream has said of one reply."""

    reasoning: str = ""
    content: str = ""
    num_tokens: int = 0
    """Tokens whose logprobs were sent."""

    def add(self, delta: ChatDelta) -> None:
        """Note what a delta says."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.num_tokens += len(delta.tokens)

    def rest(self, reply: ChatReply, index: int = 0) -> ChatDelta:
        """What is left of the texts and tokens of a reply.

        Raises:
            StreamDiverged: the reply does not begin as was said.
        """
        reasoning = reply.reasoning_content or ""
        if not (reasoning.startswith(self.reasoning) and reply.content.startswith(self.content)):
            raise StreamDiverged("the reply does not begin with what was streamed of it")
        return ChatDelta(
            index=index,
            reasoning=reasoning[len(self.reasoning) :],
            content=reply.content[len(self.content) :],
            tokens=token_logprobs(reply)[self.num_tokens :],
        )


class BlockStream(ABC):
    """Streams one reply in blocks: thinking and text, each of which is started, grows, and is closed."""

    ping = PING

    def __init__(self) -> None:
        self._said = StreamedReply()
        self._open = ""
        """The kind of the open block: "thinking", "text", another one, or none."""

    def delta(self, delta: ChatDelta) -> bytes:
        """Thinking, then text."""
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
        """More of the open block."""

    @abstractmethod
    def _close(self, status: str) -> list[bytes]:
        """End the open block, if there is one; the status is that of what it says."""


def token_logprobs(reply: ChatReply) -> tuple[TokenLogprob, ...]:
    """The tokens of a reply with their logprobs; empty where it has no texts of them or no logprobs."""
    if reply.logprobs is None or not reply.token_texts:
        return ()
    pairs = zip(reply.token_texts, reply.logprobs.tolist(), strict=True)
    return tuple(TokenLogprob(text=text, logprob=logprob) for text, logprob in pairs)
