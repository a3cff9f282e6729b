"""Plays the user of a conversation with a model behind a chat server."""

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
"""What the user says at the end of its last message."""
PROMPT = (
    "You are a person who talks with an assistant. Stay in your role, write one short message at a time, and do not "
    f"help the assistant. Once you have what you want, or see that you will not get it, answer with {STOP} alone."
)
"""What a simulated user is told, before the task's own `user` text."""


@dataclass(frozen=True, kw_only=True)
class UserSimulator:
    """A model that answers whenever the assistant speaks without calling a tool, until it says `STOP`.

    It sees the spoken messages from the other side: the assistant's as the user's and its own as the assistant's; no
    tools, no system message. A task's field `user` is added to its prompt.

    Example: `UserSimulator(api=OpenAI(model="qwen3.5-32b", base_url="http://localhost:8000/v1"))`.

    Raises:
        UsageError: `api` is no `OpenAI`.
    """

    api: OpenAI
    """The model and its server."""
    prompt: str = PROMPT
    """Its system message."""
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=512))
    """How its tokens are drawn."""

    def __post_init__(self) -> None:
        if not isinstance(self.api, OpenAI):
            raise UsageError(f'user: api = {self.api!r:.80}; expected OpenAI(model="...", base_url="http://...")')

    async def answer(
        self, connection: ChatConnection, spoken: Sequence[Message], task: Mapping[str, Any], usage: Counter[str]
    ) -> str | None:
        """What the user says next; None where it ends the conversation.

        Args:
            connection: An open way to its server. Serves any number of conversations.
            spoken: The messages of user and assistant so far.
            task: The task's own fields; `user` is added to the prompt.
            usage: The server's token counts, and the requests that had to be made again, are added.

        Raises:
            SamplerFault: the server failed for good.
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
