"""Parses a completion while it grows, to find the thinking and text that its reply is certain to begin with."""

from __future__ import annotations

from dataclasses import dataclass, field

from verbatim.core.types import Int32
from verbatim.inference.chat.protocol import ChatDelta, ChatRequest
from verbatim.inference.chat.stops import find_stop, held_back
from verbatim.inference.chat.streaming import StreamedReply
from verbatim.models.renderers.renderer import ReadsGrowingText, Renderer

_STEP = 64
"""A completion is parsed again once it has grown by 1/64 of its length. Because each parse starts from the beginning,
streaming costs about 64 times as much as parsing the complete text once, regardless of the text's length."""


def partial_texts(ids: Int32, request: ChatRequest, renderer: Renderer, prompt_ids: Int32) -> tuple[str, str]:
    """The (reasoning, content) that the final reply is certain to begin with, regardless of what is sampled next.

    Both are empty if the renderer cannot tell, or if a stop string is complete, because then the final reply follows
    immediately.

    Args:
        ids: Ids sampled so far: int32 [C].
        request: The request.
        renderer: The model's renderer.
        prompt_ids: The prompt: int32 [P].
    """
    if not isinstance(renderer, ReadsGrowingText) or find_stop(ids, request.stop, renderer.decode) is not None:
        return "", ""
    # The end of the text may turn out to be the start of a stop string, and stop strings must not be sent.
    reasoning, content = renderer.stable_text(ids, prompt_ids)
    if content:
        return reasoning, content[: len(content) - held_back(content, request.stop)]
    return reasoning[: len(reasoning) - held_back(reasoning, request.stop)], ""


@dataclass
class Growing:
    """A growing completion: tracks what was streamed, and when to parse it again."""

    index: int = 0
    """Index among the request's replies."""
    said: StreamedReply = field(default_factory=StreamedReply)
    """What was streamed so far."""
    ids: list[int] = field(default_factory=list)
    """Ids sampled so far."""
    num_read: int = 0
    """Number of ids at the last parse."""

    @property
    def is_due(self) -> bool:
        """True if the completion has grown enough to be parsed again."""
        return len(self.ids) - self.num_read > self.num_read // _STEP

    def gained(self, reasoning: str, content: str) -> ChatDelta | None:
        """Record that this reasoning and content are streamed. Returns the part that is new, or None."""
        self.num_read = len(self.ids)
        new = (reasoning[len(self.said.reasoning) :], content[len(self.said.content) :])
        delta = ChatDelta(index=self.index, reasoning=new[0], content=new[1])
        self.said.add(delta)
        return delta if any(new) else None
