"""Settings of a gateway session, and the interface of its observer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from verbatim.inference.chat.protocol import ChatReply, ChatRequest


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """Settings that say how a session treats its requests."""

    sampling: Literal["run", "client"] = "run"
    """Which values of temperature, top_p, top_k, min_p and seed apply: "run" for the values in the run's configuration
    (values in requests are then ignored and counted), "client" for the values in the requests."""
    restores_reasoning: bool | None = None
    """True to treat an answer that a client sends back without its reasoning as the original answer; None means True if
    the renderer keeps earlier answers exactly as they were sampled, and so decides itself what happens to the
    reasoning."""
    train_undelivered: bool = False
    """True to train also those answers that no client received in full and that no later request continued."""
    patience: float = 2.0
    """Seconds for which generation continues after the client has disconnected."""
    max_requests: int = 10_000
    """Maximum total number of requests of one session."""
    max_open: int = 256
    """Maximum number of requests of one session that are open at the same time."""


class AnswerWatch(Protocol):
    """Observes the requests of a session and their answers."""

    def placed(self, request: ChatRequest, body: Mapping[str, Any], turns: Mapping[int, int]) -> None:
        """Called when a request has been matched to its conversation.

        Args:
            request: The parsed request.
            body: The request's JSON.
            turns: Indices of recorded turns, keyed by the index of the message in which the turn was recognised.
        """

    def answered(self, request: ChatRequest, reply: ChatReply, turn: int) -> None:
        """Called when a reply has been sampled and recorded as the turn with the index `turn`."""
