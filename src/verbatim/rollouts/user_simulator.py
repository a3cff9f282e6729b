"""Simulates the user of a conversation, with a model behind a chat server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Message
from verbatim.inference.chat.client import ChatConnection, OpenAI
from verbatim.inference.chat.request import chat_body

STOP = "###STOP###"
"""The text with which the simulated user ends the conversation."""
PROMPT = (
    "You are a person who talks with an assistant. Stay in your role, write one short message at a time, and do not "
    f"help the assistant. Once you have what you want, or see that you will not get it, answer with {STOP} alone."
)
"""The simulated user's system prompt. The text in the task's field `user` is appended to it."""


@dataclass(frozen=True, kw_only=True)
class UserSimulator:
    """A model that plays the user: it replies whenever the assistant answers without a tool call, until it writes
    `STOP`.

    The simulating model sees the conversation with the roles swapped: the assistant's messages are shown to it as user
    messages, and its own messages as assistant messages. It sees neither tools nor the assistant's system message. If
    the task has a field `user`, the field's text is appended to the simulating model's system message.

    Example: `UserSimulator(api=OpenAI(model="qwen3.5-32b", base_url="http://localhost:8000/v1"))`.

    Raises:
        UsageError: `api` is not an `OpenAI`.
    """

    api: OpenAI
    """The model, and the server on which it runs."""
    prompt: str = PROMPT
    """The simulated user's system message."""
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=512))
    """Sampling parameters of the simulated user's messages."""

    def __post_init__(self) -> None:
        if not isinstance(self.api, OpenAI):
            raise UsageError(f'user: api = {self.api!r:.80}; expected OpenAI(model="...", base_url="http://...")')

    async def answer(
        self, connection: ChatConnection, spoken: Sequence[Message], task: Mapping[str, Any], usage: Counter[str]
    ) -> str | None:
        """Return the user's next message, or None if the user ends the conversation.

        Args:
            connection: An open connection to the server. Any number of conversations may share it.
            spoken: The messages of the user and the assistant so far.
            task: The task's own fields. The field `user`, if there is one, is appended to the system message.
            usage: Counter to which the server's token counts, and the number of retries by error, are added.

        Raises:
            SamplerFault: the server failed, and retries did not help.
        """
        prompt = self.prompt + (f"\n\n{task['user']}" if task.get("user") else "")
        seen: list[Message] = [{"role": "system", "content": prompt}]
        for message in spoken:
            role = "user" if message["role"] == "assistant" else "assistant"
            seen.append({"role": role, "content": message.get("content") or ""})
        body = chat_body(self.api.model, seen, (), self.sampling_params, extra_body={})
        try:
            said = await connection.complete(body, usage)
        except SamplerFault as fault:
            raise SamplerFault(f"the simulated user: {fault}") from fault
        usage.update(said.usage)
        return None if STOP in said.content else said.content
