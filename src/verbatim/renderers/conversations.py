"""Remembers the messages that prompts in use were rendered from, so that they can be continued.

A bridge is given ids, and needs the messages behind them and the text that the template wrote for those. Both are kept
under the ids of the prompt for as long as the array that holds these ids is alive: each open thread of an episode holds
the array of its newest prompt, so the newest text is what is kept. Threads with the same prompt share it, and it goes
with the last of them.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verbatim.types import Int32

_MOST_ALIKE = 8
"""Conversations that are told apart although the template writes the same prompt for them."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation up to a prompt, as the template was given it (marked by the guard)."""

    messages: list[dict[str, Any]]
    """Never changed: copies of what the environment gave."""
    tools: Any
    """The schemas that were shown; None if there were none."""
    text: str
    """What the template wrote, generation prompt included; never rendered again."""


@dataclass(eq=False)
class _Prompt:
    """All that is known of one sequence of ids; weakly referenced by the table, held by each array of these ids."""

    conversations: list[Conversation] = field(default_factory=list)


class OpenPrompts:
    """Prompts by their ids. May be used from several threads."""

    def __init__(self) -> None:
        self._by_ids: weakref.WeakValueDictionary[bytes, _Prompt] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_ids)

    def add(self, ids: Int32, conversation: Conversation) -> None:
        """Keep what a prompt was rendered from, until the array `ids` is freed."""
        key = _key(ids)
        with self._lock:
            prompt = self._by_ids.get(key)
            if prompt is None:
                prompt = self._by_ids[key] = _Prompt()
            if len(prompt.conversations) <= _MOST_ALIKE and conversation not in prompt.conversations:
                prompt.conversations.append(conversation)
        weakref.finalize(ids, _release, prompt).atexit = False

    def of(self, ids: Int32, tools: Any) -> list[Conversation]:
        """The conversations with these tools that have this prompt; none if there are too many to tell apart."""
        prompt = self._by_ids.get(_key(ids))
        if prompt is None or len(prompt.conversations) > _MOST_ALIKE:
            return []
        return [known for known in prompt.conversations if known.tools == tools]


def _release(prompt: _Prompt) -> None:
    """Called when an array is freed; its reference to the prompt goes with the call."""


def _key(ids: Int32) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).data, digest_size=16).digest()
