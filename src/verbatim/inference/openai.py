"""Re-exports the chat-completions client's settings under their documented import path."""

from verbatim.inference.chat.client import Connection, OpenAI
from verbatim.inference.http.client import pause

__all__ = ["Connection", "OpenAI", "pause"]
