"""Converts a teacher's turns to the ids of the student that imitates them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.errors import ModelError, RecordError, UsageError
from verbatim.renderers.base import Renderer
from verbatim.rollouts.demonstrations import trajectory_from_messages
from verbatim.rollouts.loop import Answer, Prompt, Thread
from verbatim.rollouts.recorder import Recorder
from verbatim.types import Message, ParseStatus, Turn


class StudentTurns:
    """Holds what a teacher said until the episode is over, and records it in the student's ids then.

    A student imitates texts: the ids are those of its own renderer. They are made at the end, because a template may
    write an answer differently once something follows it. The teacher's logprobs are unknown.

    Args:
        renderer: The student's.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._held: list[dict[str, Any]] = []
        self._schemas: dict[str, Sequence[Mapping[str, Any]]] = {}

    def begin(self, prompt: Prompt) -> None:
        """Refuse a prompt that does not continue its agent's conversation: only one can be imitated.

        Raises:
            RecordError: the agent's earlier messages or its tools have changed.
        """
        thread = prompt.thread
        if thread is None:
            self._schemas[prompt.agent] = copy.deepcopy(prompt.schemas)
        elif not prompt.num_known or thread.tools != prompt.tools:
            raise _other_history(prompt, thread)

    def hold(self, answer: Answer, prompt: Prompt, thread: Thread | None, state_key: str | None) -> int:
        """Keep a turn; its number.

        Args:
            answer: What the teacher said.
            prompt: What it answered.
            thread: The agent's conversation as it is now.
            state_key: The environment's state in which it was said.

        Raises:
            RecordError: another turn of the agent has ended since the prompt was made.
        """
        if thread is not None and thread is not prompt.thread:
            raise _other_history(prompt, thread)
        self._held.append(answer.turn_fields(prompt.agent, state_key))
        return len(self._held) - 1

    def amend_last(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus) -> None:
        """Add what became known after the answer."""
        held = self._held[-1]
        held["reward"], held["timing"] = reward, dataclasses.replace(held["timing"], tools=tool_seconds)
        held["parse_status"] = held["parse_status"] if held["parse_status"] != "ok" else parse_status

    def record(self, recorder: Recorder, conversations: Mapping[str, Sequence[Message]]) -> None:
        """Record every turn, in the order in which they were said.

        Args:
            recorder: Gets the turns.
            conversations: Each agent's messages, to its last turn.

        Raises:
            RecordError: the student's template cannot write what was said.
        """
        written: dict[str, list[Turn]] = {}
        for agent, messages in conversations.items():
            num_said = sum(held["agent"] == agent for held in self._held)
            try:
                turns = trajectory_from_messages(self._renderer, messages, self._schemas[agent] or None).turns
            except ModelError:
                raise
            except UsageError as error:
                raise RecordError(f"agent {agent}: {error}") from error
            written[agent] = list(turns[-num_said:])
        for held in self._held:
            turn = written[held["agent"]].pop(0)
            recorder.count(len(turn.completion_ids))
            recorder.record(prompt_ids=turn.prompt_ids, completion_ids=turn.completion_ids, **held)


def _other_history(prompt: Prompt, thread: Thread) -> RecordError:
    return RecordError(
        f"agent {prompt.agent}: its conversation or its tools are not what they were in turn {thread.turn}; what a "
        "teacher said is imitated in one conversation, so give another history another agent name"
    )
