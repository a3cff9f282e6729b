"""Messages of clients as templates can write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbatim.types import Message


def readable(message: Message) -> Message:
    """A message as templates can write it: calls that are none are text, behind the content.

    >>> call = {"function": {"name": "add", "arguments": "{1"}}
    >>> readable({"role": "assistant", "content": "so", "tool_calls": [call]})
    {'role': 'assistant', 'content': 'so\n{1'}
    """
    calls = message.get("tool_calls")
    if not calls or all(isinstance(c["function"]["arguments"], Mapping) and c["function"]["name"] for c in calls):
        return message
    whole = [c for c in calls if isinstance(c["function"]["arguments"], Mapping) and c["function"]["name"]]
    texts = [message["content"], *(_text(c["function"]["arguments"]) for c in calls if c not in whole)]
    changed: Message = {**message, "content": "\n".join(filter(None, texts)), "tool_calls": whole}
    if not whole:
        del changed["tool_calls"]
    return changed


def _text(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments) if arguments else ""
