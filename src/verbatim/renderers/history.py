"""What a bridge has to know of the messages behind a prompt, kept beside the prompt's ids instead of the messages.

A bridge is given ids, and reading a history out of them would cost as much as rendering it. So whoever makes a prompt
notes what it was made of; a prompt that nobody noted is not continued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verbatim.renderers.proof import REASONING, Situation
from verbatim.types import Int32

_REMEMBERED = 65_536
"""Prompts that are remembered: a few hundred bytes each."""
_FIELDS = frozenset({"role", "content", "tool_call_id", "name"})
_OF_ASSISTANTS = _FIELDS | {"tool_calls", *REASONING}


@dataclass(frozen=True, kw_only=True)
class History:
    """Messages, as far as it matters to what comes after them."""

    roles: frozenset[str]
    last: str
    """The role of the last message."""
    text: bool
    """Every content is text."""
    plain: bool
    """No content holds a marker that the template looks for in texts."""
    thought: bool
    """Some message has reasoning."""
    called: bool
    """Some message has tool calls."""
    named: bool
    """Every tool's answer says which tool it is from."""
    usual: bool
    """No message has other fields than chat messages have."""
    tools: frozenset[str]
    """The tools that were shown; more than one list of them if they all make the same prompt."""

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], tools: str, markers: frozenset[str]) -> History:
        """Of messages as the template is given them, one at least; `tools` is the `digest` of what was shown."""
        contents = [message.get("content") for message in messages]
        return cls(
            roles=frozenset(str(message["role"]) for message in messages),
            last=str(messages[-1]["role"]),
            text=all(isinstance(content, str) for content in contents),
            plain=not any(marker in content for marker in markers for content in contents if isinstance(content, str)),
            thought=any(message.get(key) is not None for message in messages for key in REASONING),
            called=any("tool_calls" in message for message in messages),
            named=all(message.get("name") for message in messages if message["role"] == "tool"),
            usual=all(
                message.keys() <= (_OF_ASSISTANTS if message["role"] == "assistant" else _FIELDS)
                for message in messages
            ),
            tools=frozenset({tools}),
        )

    def then(self, other: History) -> History:
        """This history with another one after it."""
        return History(
            roles=self.roles | other.roles, last=other.last, text=self.text and other.text,
            plain=self.plain and other.plain, thought=self.thought or other.thought,
            called=self.called or other.called, named=self.named and other.named, usual=self.usual and other.usual,
            tools=other.tools,
        )  # fmt: skip

    def situation(self, reply: History, new: History) -> Situation | None:
        """Before a sampled turn and what is appended; None if that is nothing a proof is for."""
        whole = self.then(reply).then(new)
        if not (whole.usual and whole.text and new.tools <= self.tools) or "assistant" in new.roles:
            return None
        return Situation(
            roles=self.roles, last=self.last, plain=self.plain, thought=self.thought, called=self.called,
            named=whole.named, reply_thought=reply.thought, reply_called=reply.called, appended=new.roles,
        )  # fmt: skip

    def either(self, other: History) -> History | None:
        """What is known of a history that is this one or the other; None if they have too little in common."""
        if (self.roles, self.last) != (other.roles, other.last):
            return None
        return replace(self.then(other), tools=self.tools | other.tools)


class Notes:
    """Prompts by their ids, and the history behind each; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: dict[str, History | None] = {}

    def add(self, ids: Int32, history: History) -> None:
        """Note what a prompt was made of. Of one that different messages make, what they have in common."""
        key = digest(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
        before = self._known.get(key, history)
        self._known[key] = before.either(history) if before is not None else None
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def of(self, ids: Int32) -> History | None:
        """What is known of a prompt."""
        return self._known.get(digest(np.ascontiguousarray(ids, dtype=np.int32).tobytes()))


def digest(data: bytes) -> str:
    """What stands for ids and for lists of tools; two that differ never share it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
