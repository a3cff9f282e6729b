"""The chat protocols that every server speaks, and the cards of its models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses
from verbatim.inference.chat.protocol import Options

COUNT = "messages/count_tokens"
"""The route, below "/v1/", at which Anthropic's clients ask for the tokens of a prompt."""


class ChatProtocols:
    """The protocols by route, below "/v1/".

    Args:
        options: Fields of requests that are let pass without effect.
    """

    def __init__(self, options: Options) -> None:
        self.anthropic = AnthropicMessages(options)
        self.by_route: dict[str, ChatProtocol] = {
            "chat/completions": OpenAIChat(options),
            "responses": OpenAIResponses(options),
            "messages": self.anthropic,
            COUNT: AnthropicMessages(options, needs_limit=False),
        }

    def of(self, route: str) -> ChatProtocol:
        """The protocol in whose form errors at a route, or below it, are written; OpenAI's for those of none."""
        found = [own for own in self.by_route if route == own or route.startswith(f"{own}/")]
        return self.by_route[max(found, key=len, default="chat/completions")]


def model_card(name: str, context_length: int, created: int = 0) -> dict[str, Any]:
    """A model in OpenAI's format and in Anthropic's at once: each client reads its own fields.

    Args:
        name: Of the model.
        context_length: Tokens.
        created: Seconds since 1970.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "verbatim",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "max_model_len": context_length,
    }


def model_list(card: dict[str, Any]) -> dict[str, Any]:
    """The list of one model, in both formats."""
    return {"object": "list", "data": [card], "first_id": card["id"], "last_id": card["id"], "has_more": False}
