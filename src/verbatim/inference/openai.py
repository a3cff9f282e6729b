"""The documented address of the chat-completions client's settings."""

from verbatim.inference.chat.client import Connection, OpenAI
from verbatim.inference.http.client import pause

__all__ = ["Connection", "OpenAI", "pause"]
