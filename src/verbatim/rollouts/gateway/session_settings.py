"""Settings of a gateway session, and the observer interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from verbatim.inference.chat.protocol import ChatReply, ChatRequest


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a session treats its requests."""

    sampling: Literal["run", "client"] = "run"
    """Source of temperature, top_p, top_k, min_p and seed. With "run", those of requests are ignored and counted."""
    restores_reasoning: bool | None = None
    """True to treat an answer that a client sends back without its reasoning as the original answer. None: True if the
    renderer continues answers as sampled, and so decides itself what to do with the reasoning."""
    train_undelivered: bool = False
    """True to train answers that no client received in full and that no later request continued."""
    patience: float = 2.0
    """How long generation continues after the client has disconnected, in seconds."""
    max_requests: int = 10_000
    """Maximum number of requests of one session in total."""
    max_open: int = 256
    """Maximum number of open requests of one session."""


class AnswerWatch(Protocol):
    """Observes the requests of a session and their answers."""

    def placed(self, request: ChatRequest, body: Mapping[str, Any], turns: Mapping[int, int]) -> None:
        """Called when a request has been matched to its conversation.

        Args:
            request: The request, parsed.
            body: The request's JSON.
            turns: Indices of recorded turns, by the index of the message in which each was recognised.
        """

    def answered(self, request: ChatRequest, reply: ChatReply, turn: int) -> None:
        """Called when a reply has been sampled and recorded as `turn`."""
