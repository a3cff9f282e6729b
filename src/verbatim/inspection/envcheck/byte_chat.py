"""Defines a chat format whose tokens are bytes and a few markers, for checks without a model.

Text, reasoning and tool calls can be rendered and parsed back without loss; names and call ids are not rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verbatim.core.types import Int32, Message, ToolCall
from verbatim.models.renderers.renderer import ParsedResponse, Schemas

_ROLES = {"tools": 256, "system": 257, "user": 258, "assistant": 259, "tool": 260}
END, CALL, CALL_END, THINK, THINK_END = range(261, 266)
VOCAB_SIZE = 266


@dataclass(frozen=True, kw_only=True)
class ReadConversation:
    """The messages and tools that `read_prompt` has parsed from a prompt."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)


class ByteChat:
    """A `Renderer` for this format."""

    name = "bytes"
    stop_token_ids: tuple[int, ...] = (END,)
    thread_safe = True

    def render_ids(
        self, messages: Sequence[Message], tools: Schemas = None, add_generation_prompt: bool = True
    ) -> Int32:
        """Return the ids of a conversation: int32 [L]."""
        ids: list[int] = []
        if tools:
            ids += [_ROLES["tools"], *_bytes(json.dumps(list(tools))), END]
        for message in messages:
            ids += [_ROLES.get(message["role"], _ROLES["user"]), *written(message)]
        return np.array([*ids, _ROLES["assistant"]] if add_generation_prompt else ids, dtype=np.int32)

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Parse the ids of a completion into a response."""
        return _parsed(completion_ids.tolist())

    def bridge_to_next_turn(
        self, prev_prompt_ids: Int32, prev_completion_ids: Int32, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | None:
        """Return the previous turn's ids, with `END` added if that turn was cut off, followed by the ids of the new
        messages."""
        ended = len(prev_completion_ids) and prev_completion_ids[-1] == END
        closed = [] if ended else [np.array([END], dtype=np.int32)]
        return np.concatenate([prev_prompt_ids, prev_completion_ids, *closed, self.render_ids(new_messages)])

    def decode(self, ids: Int32) -> str:
        """Return the ids as text for display."""
        return _text(ids.tolist())


def written(message: Mapping[str, Any]) -> list[int]:
    """The token ids of a message, including its end token. For an assistant message, these are exactly the ids that a
    model would sample."""
    ids: list[int] = []
    if message.get("reasoning_content"):
        ids += [THINK, *_bytes(message["reasoning_content"]), THINK_END]
    ids += _bytes(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        ids += [CALL, *_bytes(json.dumps(call["function"])), CALL_END]
    return [*ids, END]


def read_prompt(ids: Sequence[int]) -> ReadConversation:
    """Parse the ids of a prompt into messages and tools."""
    names = {token: role for role, token in _ROLES.items()}
    found = ReadConversation()
    starts = [place for place, token in enumerate(ids) if token in names]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        role, part = names[ids[start]], list(ids[start + 1 : stop])
        if role == "tools":
            found.tools.extend(json.loads(_text(part)))
        elif part:  # the generation prompt at the end is a role token without a message
            found.messages.append({**_parsed(part).message(), "role": role})
    return found


def _parsed(ids: list[int]) -> ParsedResponse:
    reasoning: str | None = None
    if ids[:1] == [THINK]:
        end = ids.index(THINK_END) if THINK_END in ids else len(ids)
        reasoning, ids = _text(ids[1:end]), ids[end + 1 :]
    calls = []
    while CALL in ids:
        start = ids.index(CALL)
        end = ids.index(CALL_END, start) if CALL_END in ids[start:] else len(ids)
        calls.append(_call(_text(ids[start + 1 : end]), is_whole=end < len(ids)))
        ids = [*ids[:start], *ids[end + 1 :]]
    return ParsedResponse(content=_text(ids), reasoning_content=reasoning, tool_calls=tuple(calls))


def _call(raw: str, *, is_whole: bool) -> ToolCall:
    try:
        function = json.loads(raw)
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        return ToolCall(name=function["name"], arguments=arguments, raw=raw)
    except (ValueError, TypeError, KeyError):
        return ToolCall(name=None, arguments=None, status="invalid_json" if is_whole else "unclosed_block", raw=raw)


def _bytes(text: str) -> list[int]:
    return list(text.encode(errors="replace"))  # a lone surrogate cannot be encoded as UTF-8


def _text(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")
