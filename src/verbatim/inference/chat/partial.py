"""Reads a completion while it grows: the thinking and the text that its reply will begin with, whatever follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from verbatim.core.types import Int32
from verbatim.inference.chat.protocol import ChatDelta, ChatRequest
from verbatim.inference.chat.stops import find_stop, held_back
from verbatim.inference.chat.streaming import StreamedReply
from verbatim.models.renderers.renderer import ReadsGrowingText, Renderer

_STEP = 64
"""A completion is read again once it has grown by this part of its length, so that all readings together cost no more
than this many readings of the whole."""


def partial_texts(ids: Int32, request: ChatRequest, renderer: Renderer, prompt_ids: Int32) -> tuple[str, str]:
    """Thinking and content that `read_reply` of every completion that begins with these ids begins with.

    Empty where the renderer cannot say, and where a stop string has ended the completion: then the reply is at hand.

    Args:
        ids: Sampled so far: int32 [C].
        request: What was asked for.
        renderer: The model's.
        prompt_ids: The prompt: int32 [P].
    """
    if not isinstance(renderer, ReadsGrowingText) or find_stop(ids, request.stop, renderer.decode) is not None:
        return "", ""
    reasoning, content = renderer.stable_text(ids, prompt_ids)
    if content:
        return reasoning, content[: len(content) - held_back(content, request.stop)]
    return reasoning[: len(reasoning) - held_back(reasoning, request.stop)], ""


@dataclass
class Growing:
    """What a stream has said of a completion that grows, and when it is worth reading again."""

    index: int = 0
    """Which of several replies it is."""
    said: StreamedReply = field(default_factory=StreamedReply)
    ids: list[int] = field(default_factory=list)
    """Sampled so far."""
    num_read: int = 0

    @property
    def is_due(self) -> bool:
        """Whether it has grown enough since it was read."""
        return len(self.ids) - self.num_read > self.num_read // _STEP

    def gained(self, reasoning: str, content: str) -> ChatDelta | None:
        """The delta to texts that were read; None if there is nothing new in them."""
        self.num_read = len(self.ids)
        new = (reasoning[len(self.said.reasoning) :], content[len(self.said.content) :])
        delta = ChatDelta(index=self.index, reasoning=new[0], content=new[1])
        self.said.add(delta)
        return delta if any(new) else None
