"""What a session makes of its requests, and who is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from verbatim.inference.chat.protocol import ChatReply, ChatRequest


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session makes of its requests."""

    sampling: Literal["run", "client"] = "run"
    """Whose temperature, top_p, top_k, min_p and seed hold. With "run" those of requests are counted, not honoured."""
    restores_reasoning: bool | None = None
    """Whether an answer that comes back without its reasoning is taken for the whole answer. None: where prompts
    continue what was sampled, which then decides what becomes of the reasoning."""
    train_undelivered: bool = False
    """Whether an answer is trained that no client has received to its end, and that none went on from."""
    patience: float = 2.0
    """Seconds for which an answer is still generated when its client has gone."""
    max_requests: int = 10_000
    """Most requests of one session."""
    max_open: int = 256
    """Most requests of one session at a time."""


class AnswerWatch(Protocol):
    """Is told of every request of a session that is answered, and of every answer."""

    def placed(self, request: ChatRequest, body: Mapping[str, Any], turns: Mapping[int, int]) -> None:
        """A request has found its place.

        Args:
            request: As its protocol read it.
            body: As the client wrote it.
            turns: The messages of the request that were recognised as sampled ones, by index: the turns that they
                are.
        """

    def answered(self, request: ChatRequest, reply: ChatReply, turn: int) -> None:
        """A reply was sampled and recorded as this turn."""
