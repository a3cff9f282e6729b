"""Lets a check see how clients write down what was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verbatim.inference.chat.protocol import ChatReply, ChatRequest


class Watch(Protocol):
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
