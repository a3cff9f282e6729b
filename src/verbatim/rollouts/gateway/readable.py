"""Messages of clients as templates can write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbatim.core.types import Message
from verbatim.models.renderers.messages import is_deep


def readable(message: Message) -> Message:
    """A message as templates can write it: calls that are none are text, behind the content. Calls whose arguments are
    nested too deeply are left as they are, for the renderer refuses them by their field.

    >>> call = {"function": {"name": "add", "arguments": "{1"}}
    >>> readable({"role": "assistant", "content": "so", "tool_calls": [call]})
    {'role': 'assistant', 'content': 'so\nadd {1'}
    """
    calls = message.get("tool_calls")
    whole = [c for c in calls or () if _is_call(c["function"]["arguments"]) and c["function"]["name"]]
    if not calls or len(whole) == len(calls):
        return message
    texts = [message["content"], *(_text(**c["function"]) for c in calls if c not in whole)]
    changed: Message = {**message, "content": "\n".join(filter(None, texts)), "tool_calls": whole}
    if not whole:
        del changed["tool_calls"]
    return changed


def _is_call(arguments: str | Mapping[str, Any]) -> bool:
    return isinstance(arguments, Mapping) or is_deep(arguments)


def _text(name: str, arguments: str | Mapping[str, Any]) -> str:
    """Name and arguments; the text of a call that was sampled here holds its name already, if it had one."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False) if arguments else ""
    return text if name in text else f"{name} {text}".rstrip()
