"""Formats messages as plain text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verbatim.core.texts import cut


def message_text(message: Mapping[str, Any], longest: int) -> str:
    """A message as text: its content, then its tool calls in Python syntax, cut after `longest` characters.

    >>> message_text({"role": "assistant", "content": "", "tool_calls": [
    ...     {"id": "1", "type": "function", "function": {"name": "guess", "arguments": {"number": 8}}}]}, 100)
    'guess(number=8)'
    """
    content = message.get("content") or ""
    parts = [content.strip() if isinstance(content, str) else str(content)]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        arguments = function.get("arguments", "")
        if isinstance(arguments, Mapping):
            arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        parts.append(f"{function.get('name', '?')}({arguments})")
    return cut("\n".join(part for part in parts if part) or "(nothing)", longest)


def conversation_text(messages: Iterable[Mapping[str, Any]], longest: int) -> str:
    """All messages as text, each below its role, cut after `longest` characters in total.

    >>> print(conversation_text([{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}], 100))
    [user]
    go
    <BLANKLINE>
    [assistant]
    gone
    """
    parts: list[str] = []
    left = longest
    for message in messages:
        if left < 0:
            break
        parts.append(f"[{message.get('role', '')}]\n{message_text(message, longest)}")
        left -= len(parts[-1])
    return cut("\n\n".join(parts), longest)
