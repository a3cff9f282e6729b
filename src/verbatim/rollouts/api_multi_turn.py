"""Runs multi-turn rollouts over a chat-completions server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.errors import UsageError
from verbatim.inference.chat.client import OpenAI
from verbatim.rollouts.base import Opening
from verbatim.rollouts.chat_loop import ChatLoop
from verbatim.rollouts.conversation_rollout import ConversationRollout, Start
from verbatim.rollouts.loop import EpisodeLoop
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.token_tree import LARGEST_ID


@dataclass(frozen=True, kw_only=True, eq=False)
class APIMultiTurnRollout(ConversationRollout):
    """A `Rollout` over any OpenAI-compatible server.

    Example:
        >>> api = OpenAI(model="qwen3.5-32b", base_url="http://localhost:8000/v1")
        >>> rollout = APIMultiTurnRollout(api=api, tool_manager=ToolManager([search]), max_turns=6, concurrency=8)
        >>> (result,) = rollout([{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}])
        >>> result["stop_reason"], result["turns"], result["messages"][-1]["content"]
        ('stop', 2, 'Jane Austen.')
    """

    api: OpenAI
    """The server and the model."""
    concurrency: int = 8
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Goes into every request; a None leaves a key out. `{"return_token_ids": True}` asks a server that knows it (vLLM)
    for the exact ids and their logprobs: then trajectories can be trained on."""
    send_reasoning: bool = False
    """Whether `reasoning_content` of earlier messages is sent back; it is recorded in any case."""
    seed: int | None = None
    """Every request gets a seed of its own made from this one, its example, sample and turn; None sends none. vLLM for
    CPUs ends at a seed where it computes a prompt in parts."""
    trajectory_timeout: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.api, OpenAI):
            raise UsageError(f'api: {self.api!r:.80}; expected OpenAI(model="...", base_url="http://localhost:8000/v1")')
        if self.extra_body.get("stream") or self.extra_body.get("n") not in (None, 1):
            raise UsageError("extra_body asks for a stream, or for several answers; a turn is one whole answer")

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[Start]:
        limits, seed = self._limits(), self.seed
        async with self.api.connect() as connection:

            def start(index: int, opening: Opening) -> tuple[EpisodeLoop, int | None]:
                identity = opening.identity

                def seed_of(number: int) -> int | None:
                    if seed is None:
                        return None
                    return derive_seed(seed, identity.example_id, identity.sample_index, number)

                recorder = Recorder(LARGEST_ID + 1, trajectory_id=identity.trajectory_id)
                loop = ChatLoop(
                    connection=connection, params=self.sampling_params, limits=limits, recorder=recorder,
                    seed_of=seed_of, extra_body=self.extra_body, send_reasoning=self.send_reasoning,
                )  # fmt: skip
                return loop, seed

            yield start
