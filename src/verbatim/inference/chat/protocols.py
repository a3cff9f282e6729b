"""The chat protocols of our servers, by route, and the model list."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from verbatim.inference.chat.anthropic_messages import AnthropicMessages
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.openai_chat import OpenAIChat
from verbatim.inference.chat.openai_responses import OpenAIResponses
from verbatim.inference.chat.protocol import Options

COUNT = "messages/count_tokens"
"""Anthropic's route for counting the tokens of a prompt, relative to "/v1/"."""


class ChatProtocols:
    """The protocols by route, relative to "/v1/".

    Args:
        options: Which unenforceable fields are accepted, and the maximum number of replies per response.
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
        """The protocol in whose format errors are sent for a path: the protocol of the path's route, or OpenAI's chat
        completions if no route matches."""
        found = [own for own in self.by_route if route == own or route.startswith(f"{own}/")]
        return self.by_route[max(found, key=len, default="chat/completions")]


def model_card(name: str, context_length: int, created: int = 0) -> dict[str, Any]:
    """A model's entry that has the fields of both OpenAI's and Anthropic's formats. Each client reads its own fields.

    Args:
        name: The model's name.
        context_length: Context length in tokens.
        created: Unix time in seconds.
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
    """A list with one model, with the fields of both formats."""
    return {"object": "list", "data": [card], "first_id": card["id"], "last_id": card["id"], "has_more": False}
