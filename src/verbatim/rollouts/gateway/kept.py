"""The sampled turns that a session may continue, without what its tree of messages and its record hold already."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim.core.types import Int32
from verbatim.rollouts.loop import Thread


@dataclass(eq=False)
class Kept:
    """A sampled turn that may be continued."""

    thread: Thread
    schemas: tuple[Mapping[str, Any], ...]


def with_prompt(thread: Thread, prompt_ids: Int32 | None) -> Thread:
    """The thread with its prompt as one array; with None it is left to the record."""
    conversation = thread.answer.conversation
    if conversation is not None:
        ids = np.empty(0, dtype=np.int32) if prompt_ids is None else prompt_ids
        conversation = dataclasses.replace(conversation, prompt_ids=ids)
    answer = dataclasses.replace(thread.answer, prompt_ids=prompt_ids, conversation=conversation)
    return dataclasses.replace(thread, answer=answer)


def without_messages(thread: Thread) -> Thread:
    """The thread without its messages, which the tree of the session's threads holds."""
    conversation = thread.answer.conversation
    if conversation is not None:
        conversation = dataclasses.replace(conversation, messages=())
    answer = dataclasses.replace(thread.answer, conversation=conversation)
    return dataclasses.replace(thread, messages=(), answer=answer)
