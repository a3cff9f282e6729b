"""Converts clients' messages to a form that chat templates can render."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbatim.core.types import Message
from verbatim.models.renderers.messages import is_deep


def readable(message: Message) -> Message:
    """Convert a message to a form that templates can render. A malformed call becomes text after the content. A call
    whose arguments are nested too deeply stays as it is; the renderer refuses it with an error that names the field.

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
    """Return the text of a malformed call: its name and its arguments. If the call was sampled here, its raw text
    already contains the name, which is then not repeated."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False) if arguments else ""
    return text if name in text else f"{name} {text}".rstrip()
