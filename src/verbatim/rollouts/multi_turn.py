"""Runs multi-turn rollouts in exact ids over a sampler, or in text over a chat-completions server."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import UsageError
from verbatim.core.token_tree import LARGEST_ID
from verbatim.inference.chat.client import OpenAI
from verbatim.inference.sampler import Sampler
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.chat_loop import ChatLoop
from verbatim.rollouts.conversation_rollout import ConversationRollout, Start
from verbatim.rollouts.loop import EpisodeLoop
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rollout import Opening
from verbatim.rollouts.seeds import derive_seed


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiTurnRollout(ConversationRollout):
    """A `Rollout` over a token-in, token-out sampler. The model takes a turn, its tool calls are run, and it takes the
    next turn, until it takes a turn without a tool call.

    All trajectories of a call share the sampler's batch and advance independently: while one trajectory waits for a
    tool, the others are sampled. So a slow tool or a failing trajectory does not delay the others. The same code runs
    the episodes in training.

    Example:
        >>> rollout = MultiTurnRollout(sampler=sampler, template=renderer, tool_manager=ToolManager([search]))
        >>> (result,) = rollout([{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}])
        >>> result["stop_reason"], result["turns"], result["labels"][:3]
        ('stop', 2, [-100, -100, -100])
    """

    sampler: Sampler
    """The token-in, token-out sampler."""
    template: Renderer
    """The renderer of the sampler's model."""
    max_trajectory_tokens: int | None = None
    """Maximum number of tokens in a trajectory's context; None for the sampler's context length."""
    concurrency: int = 256
    seed: int = 0
    """Seed of the sampling. Each conversation of each call derives its own seed from it."""
    trajectory_timeout: float = math.inf
    progress: bool | None = False
    _calls: Iterator[int] = field(default_factory=itertools.count, repr=False)

    _above_zero: ClassVar[tuple[str, ...]] = (*ConversationRollout._above_zero, "max_trajectory_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, method, expected in (
            ("sampler", "generate", 'TorchSampler(folder, ...) or HttpSampler("http://127.0.0.1:8000")'),
            ("template", "render_ids", 'create_renderer("auto", tokenizer)'),
        ):
            value = getattr(self, name)
            # Looked up on the type, because a class that was passed by mistake instead of an instance has the method
            # itself.
            if not callable(getattr(type(value), method, None)):
                raise UsageError(f"{name}: {value!r:.80} has no `{method}`; expected a {name} such as {expected}")

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[Start]:
        seed, limits = derive_seed(self.seed, next(self._calls)), self._limits()

        def start(index: int, opening: Opening) -> tuple[EpisodeLoop, int]:
            own = derive_seed(seed, index)
            recorder = Recorder(self.sampler.vocab_size, trajectory_id=opening.identity.trajectory_id)
            loop = AgentLoop(
                sampler=self.sampler,
                renderer=self.template,
                params=self.sampling_params,
                limits=limits,
                recorder=recorder,
                seed=own,
            )
            return loop, own

        yield start

    async def _hang_up(self) -> None:
        """Close the connections of a sampler over HTTP, because they cannot outlive the event loop."""
        hang_up = getattr(self.sampler, "hang_up", None)
        if hang_up is not None:
            await hang_up()

    def _limits(self) -> EpisodeLimits:
        longest = self.sampler.context_length
        return dataclasses.replace(super()._limits(), max_context=min(longest, self.max_trajectory_tokens or longest))


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
    """Keys that are merged into every request; a value of None removes the key. With `{"return_token_ids": True}`, a
    server that supports it (vLLM) returns the exact ids and their logprobs, so that the trajectories can be trained
    on."""
    send_reasoning: bool = False
    """True to send the `reasoning_content` of earlier messages back to the server. It is recorded in either case."""
    seed: int | None = None
    """Each request's own seed is derived from this seed, the example, the sample and the turn; None to send no seed. On
    CPUs, vLLM crashes on a request with a seed if it prefills the prompt in chunks."""
    trajectory_timeout: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.api, OpenAI):
            raise UsageError(
                f'api: {self.api!r:.80}; expected OpenAI(model="...", base_url="http://localhost:8000/v1")'
            )
        if self.extra_body.get("stream") or self.extra_body.get("n") not in (None, 1):
            raise UsageError("extra_body sets stream, or n above 1; a turn is one complete answer")

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[Start]:
        limits, seed = self._limits(), self.seed
        async with self.api.connect() as connection:

            def start(index: int, opening: Opening) -> tuple[EpisodeLoop, int | None]:
                identity = opening.identity

                def seed_of(number: int) -> int | None:
                    if seed is None:
                        return None
                    # The index in the call's list is not used, so an example gets the same seeds in every call.
                    return derive_seed(seed, identity.example_id, identity.sample_index, number)

                # Accept any id, because the size of the server's vocabulary is unknown.
                recorder = Recorder(LARGEST_ID + 1, trajectory_id=identity.trajectory_id)
                loop = ChatLoop(
                    connection=connection,
                    params=self.sampling_params,
                    limits=limits,
                    recorder=recorder,
                    seed_of=seed_of,
                    extra_body=self.extra_body,
                    send_reasoning=self.send_reasoning,
                )
                return loop, seed

            yield start
