"""Reads a file of conversations to imitate, which `warm_start.data` names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.errors import UsageError
from verbatim.types import Message

Conversation = tuple[str, Sequence[Message], Sequence[Mapping[str, Any]]]
"""Environment, messages, tool schemas."""


def read_conversations(path: Path) -> list[Conversation]:
    """Rows of `{"messages": [...], "tools": [...]}`.

    Raises:
        UsageError: no such file, or a line that is no conversation; names the line.
    """
    if not path.is_file():
        raise UsageError(f"warm_start.data: there is no file {path}")
    rows: list[Conversation] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages: list[Message] = row["messages"]
            if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages):
                raise ValueError("role and content are texts")
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("no assistant message to learn from")
            tools = row.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise ValueError("tools is a list of tool schemas")
            rows.append(("", messages, tools))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f'{path}:{number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}; {error!r}'
            ) from error
    if not rows:
        raise UsageError(f"{path} holds no conversation")
    return rows
