"""Simulates the user of a conversation with a model behind a chat server."""

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
"""Marks the end of the conversation in the simulated user's answer."""
PROMPT = (
    "You are a person who talks with an assistant. Stay in your role, write one short message at a time, and do not "
    f"help the assistant. Once you have what you want, or see that you will not get it, answer with {STOP} alone."
)
"""The simulated user's system prompt; the task's own `user` text follows it."""


@dataclass(frozen=True, kw_only=True)
class UserSimulator:
    """A model that replies whenever the assistant answers without a tool call, until it writes `STOP`.

    It sees the conversation with the roles swapped: the assistant's messages as the user's, and its own as the
    assistant's. It sees neither tools nor the assistant's system message. A task's field `user` is added to its prompt.

    Example: `UserSimulator(api=OpenAI(model="qwen3.5-32b", base_url="http://localhost:8000/v1"))`.

    Raises:
        UsageError: `api` is not an `OpenAI`.
    """

    api: OpenAI
    """The model and its server."""
    prompt: str = PROMPT
    """The system message."""
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=512))
    """Sampling parameters."""

    def __post_init__(self) -> None:
        if not isinstance(self.api, OpenAI):
            raise UsageError(f'user: api = {self.api!r:.80}; expected OpenAI(model="...", base_url="http://...")')

    async def answer(
        self, connection: ChatConnection, spoken: Sequence[Message], task: Mapping[str, Any], usage: Counter[str]
    ) -> str | None:
        """Return the user's next message, or None if it ends the conversation.

        Args:
            connection: Open connection to the server, shared by any number of conversations.
            spoken: The messages of user and assistant so far.
            task: The task's own fields; `user` is added to the prompt.
            usage: The server's token counts, and the number of retries by error, are added to this counter.

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
