"""Episodes against a chat-completions server, `concurrency` at a time: none waits for another, none harms another."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verbatim.errors import UsageError
from verbatim.inference.base import SamplingParams
from verbatim.inference.chat.client import Connection, OpenAI
from verbatim.rollouts.agent_loop import EpisodeLimits
from verbatim.rollouts.base import Conversation, Opening, check_settings, read_openings, run_to_end
from verbatim.rollouts.chat_loop import ChatEpisode, ChatRules
from verbatim.rollouts.offered import Managers, offered_tools
from verbatim.rollouts.progress import progress_bar
from verbatim.rollouts.traces import TraceFolder
from verbatim.tools.manager import ToolManager
from verbatim.types import StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class APIMultiTurnRollout:
    """A `Rollout` over any OpenAI-compatible server.

    Example:
        >>> api = OpenAI(model="qwen3.5-32b", base_url="http://localhost:8000/v1")
        >>> rollout = APIMultiTurnRollout(api=api, tool_manager=ToolManager([search]), max_turns=6, concurrency=8)
        >>> (result,) = rollout([{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}])
        >>> result["stop_reason"], result["turns"], result["messages"][-1]["content"]
        ('stop', 2, 'Jane Austen.')

    Raises:
        UsageError: a setting that cannot be.
    """

    api: OpenAI
    """The server and the model."""
    tool_manager: Managers = None
    """What runs the calls: one for all, or a list with one for each trajectory. Where it is None, a call is answered
    with an error, and counted."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """How to sample."""
    max_turns: int = 6
    """Most requests of one trajectory."""
    concurrency: int = 8
    """Most trajectories under way at a time."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Goes into every request; a None leaves a key out. `{"return_token_ids": True}` asks a server that knows it (vLLM)
    for the exact ids and their logprobs: then trajectories can be trained on."""
    send_reasoning: bool = False
    """Whether `reasoning_content` of earlier messages is sent back; it is recorded in any case."""
    seed: int | None = None
    """Every request gets a seed of its own made from this one, its example, sample and turn; None sends none. vLLM for
    CPUs ends at a seed where it computes a prompt in parts."""
    trajectory_timeout: float = 3600.0
    """Seconds for one trajectory, pauses and tools included."""
    tool_timeout: float = 60.0
    """Seconds for one tool call."""
    tool_output_limit: int = 16_384
    """Characters of one tool answer."""
    tool_error: Literal["message", "stop"] = "message"
    """What a tool that raises or hangs does: tells the model, or ends the trajectory as `api_error`."""
    max_malformed_retries: int = 2
    """Turns in a row that may hold nothing but unreadable calls; one more ends the trajectory as "malformed"."""
    trace_dir: str | Path | None = None
    """Where each trajectory is stored as a file of its own, as soon as it ends; None stores none."""
    trace_callback: Callable[[Trajectory], Any] | None = None
    """Whether a trajectory is stored; None stores all."""
    success_callback: Callable[[Trajectory], Any] | None = None
    """Whether its file is called `ok-` or `fail-`; None = whether it ended of itself, without an error."""
    progress: bool | None = None
    """Whether a bar is drawn; None = where standard error is a terminal."""

    @classmethod
    def remote(cls, **settings: Any) -> Any:
        """The handle of a Ray actor that holds such a rollout, for `ray.get(actor.__call__.remote(trajectories))`.

        Where Ray is not running it is started on this machine. The environment variable of the key has to be set on the
        actor's host.

        Raises:
            UsageError: Ray is not installed, there is no such setting, or one of them cannot travel to an actor.
        """
        from verbatim.rollouts.ray.actor import start_rollout

        return start_rollout(cls, settings)

    def __post_init__(self) -> None:
        check_settings(self, ("max_turns", "concurrency", "trajectory_timeout", "tool_timeout", "tool_output_limit"))
        if not isinstance(self.api, OpenAI):
            raise UsageError(f'api: {self.api!r:.80}; expected OpenAI(model="...", base_url="http://localhost:8000/v1")')
        if self.extra_body.get("stream") or self.extra_body.get("n") not in (None, 1):
            raise UsageError("extra_body asks for a stream, or for several answers; a turn is one whole answer")

    def __call__(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """As many trajectories as were given, in the same order; what was given is not changed.

        Args:
            trajectories: `Example`, `Trajectory`, or a mapping with `messages` (and `tools`, `id`, anything else).
            overrides: Settings for this call only: `rollout(trajectories, max_turns=3)`.

        Raises:
            UsageError: no list of conversations, an unknown setting, or not as many tool managers as trajectories.
        """
        return run_to_end(lambda: self.run(trajectories, **overrides))

    async def run(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """The same, awaited."""
        results: dict[int, Trajectory] = {}
        await self.run_each(trajectories, results.__setitem__, **overrides)
        return [results[index] for index in range(len(trajectories))]

    async def run_each(
        self, trajectories: Sequence[Conversation], finished: Callable[[int, Trajectory], object], **overrides: Any
    ) -> None:
        """The same, holding none: `finished` gets each with its place in the list, as soon as it ends.

        Raises:
            UsageError: as `__call__`.
            Exception: whatever `finished` raises; what is under way is cancelled, and given to it as such.
        """
        settings = self._override(overrides)
        openings = read_openings(trajectories)
        waiting = iter(zip(range(len(openings)), openings, offered_tools(openings, settings.tool_manager), strict=True))
        async with settings.api.connect() as connection:
            with progress_bar(len(openings), settings.progress) as advance:

                def ended(index: int, trajectory: Trajectory) -> None:
                    finished(index, trajectory)
                    advance(trajectory)

                call = _Call(settings, connection, ended)
                try:
                    async with asyncio.TaskGroup() as workers:
                        for _ in range(min(settings.concurrency, len(openings))):
                            workers.create_task(call.work(waiting))
                except BaseExceptionGroup as group:
                    raise group.exceptions[0] from None

    def _override(self, overrides: Mapping[str, Any]) -> APIMultiTurnRollout:
        names = [f.name for f in dataclasses.fields(self)]
        for name in overrides:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"a rollout has no setting {name!r}{hint} There are {', '.join(names)}")
        return dataclasses.replace(self, **overrides)


class _Call:
    """One call under way: its episodes have the server, the traces and the ending in common."""

    def __init__(
        self, settings: APIMultiTurnRollout, connection: Connection, ended: Callable[[int, Trajectory], None]
    ) -> None:
        self._connection = connection
        self._ended = ended
        self._traces: TraceFolder | None = None
        if settings.trace_dir is not None:
            self._traces = TraceFolder(Path(settings.trace_dir), trace_callback=settings.trace_callback,
                                       success_callback=settings.success_callback)  # fmt: skip
        self._rules = ChatRules(
            params=settings.sampling_params,
            limits=EpisodeLimits(
                max_turns=settings.max_turns, timeout=settings.trajectory_timeout, tool_timeout=settings.tool_timeout,
                tool_output_limit=settings.tool_output_limit, max_malformed_retries=settings.max_malformed_retries,
            ),
            extra_body=settings.extra_body, send_reasoning=settings.send_reasoning, tool_error=settings.tool_error,
            seed=settings.seed,
        )  # fmt: skip

    async def work(self, waiting: Iterator[tuple[int, Opening, ToolManager]]) -> None:
        """Play one after the other of what no other worker has taken."""
        for index, opening, tools in waiting:
            await self._play(index, opening, tools)

    async def _play(self, index: int, opening: Opening, tools: ToolManager) -> None:
        episode = ChatEpisode(connection=self._connection, opening=opening, tools=tools, rules=self._rules)
        try:
            trajectory = await episode.run()
        except asyncio.CancelledError:
            trajectory = episode.so_far(StopReason.CANCELLED)
            if self._traces is not None:
                self._traces.store(trajectory)
            self._ended(index, trajectory)
            raise
        try:
            if self._traces is not None:
                # Off the loop: the callbacks are the user's, and may take their time.
                await asyncio.to_thread(self._traces.store, trajectory)
        finally:
            self._ended(index, trajectory)
