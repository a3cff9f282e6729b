"""Re-exports the chat-completions client's settings under their documented import path."""

from verbatim.inference.chat.client import ChatConnection, OpenAI
from verbatim.inference.http.client import pause

__all__ = ["ChatConnection", "OpenAI", "pause"]
