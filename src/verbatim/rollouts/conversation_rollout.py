"""Runs conversations with any episode loop: takes conversations, and returns trajectories."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.tasks import run_together
from verbatim.core.texts import nearest
from verbatim.core.types import Example, RolloutIdentity, Trajectory
from verbatim.environments.environment import Environment, Episode
from verbatim.environments.tools import ToolManager
from verbatim.rollouts.conversation_episode import ConversationEpisode, Managers, Scorer, offered_tools
from verbatim.rollouts.episode import EpisodeRun
from verbatim.rollouts.group import judged, rewarded_by_its_turns
from verbatim.rollouts.loop import EpisodeLoop
from verbatim.rollouts.main_loop import run_in_program
from verbatim.rollouts.progress_bar import progress_bar
from verbatim.rollouts.rollout import Conversation, Opening, read_openings
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.traces import TraceFolder
from verbatim.rollouts.user_simulator import UserSimulator

Self = TypeVar("Self", bound="ConversationRollout")

Begin: TypeAlias = Callable[[], Awaitable[Episode]]
"""Function that starts an episode."""
Settle: TypeAlias = Callable[[Trajectory], Trajectory]
"""Function that completes a finished trajectory: sets the reward and success."""
Start: TypeAlias = Callable[[int, Opening], tuple[EpisodeLoop, int | None]]
"""Function that, given the index of an opening and the opening, returns a new episode loop and the seed to store in the
trajectory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ConversationRollout(abc.ABC):
    """Base class of rollout engines. Contains their common settings, and runs the episodes of a call. An invalid
    setting raises a UsageError that names the setting."""

    tool_manager: Managers = None
    """Runs the tool calls: one manager for all trajectories, or a list with one manager for each trajectory. If None, a
    tool call is answered with an error, which is counted."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of every turn."""
    max_turns: int = EpisodeLimits.max_turns
    """Maximum number of turns per trajectory. Tool calls of the last turn are not run."""
    concurrency: int
    """Maximum number of trajectories in flight."""
    trajectory_timeout: float
    """Timeout of one trajectory in seconds, including its tools."""
    tool_timeout: float = EpisodeLimits.tool_timeout
    """Timeout of one tool call in seconds."""
    tool_output_limit: int = EpisodeLimits.tool_output_limit
    """Maximum length of a tool result in characters."""
    tool_error: Literal["message", "stop"] = EpisodeLimits.tool_error
    """What happens when a tool raises an exception or times out: "message" tells the model, "stop" ends the trajectory
    with the stop reason `api_error`."""
    max_malformed_retries: int = EpisodeLimits.max_malformed_retries
    """Maximum number of consecutive turns in which all tool calls are malformed. One more such turn ends the trajectory
    with the stop reason "malformed"."""
    trace_dir: str | Path | None = None
    """Folder in which each trajectory is stored as a file as soon as it ends; None to store no files."""
    trace_callback: Callable[[Trajectory], Any] | None = None
    """Function that returns True if a trajectory is to be stored; None to store all trajectories."""
    success_callback: Callable[[Trajectory], Any] | None = None
    """Function that returns True to give a trajectory's file the name `ok-...`, False for `fail-...`. If None, a
    trajectory that ended by itself and without an error counts as a success."""
    progress: bool | None = None
    """True to show a progress bar, False to show no bar, None to show a bar only if standard error is a terminal."""
    user: UserSimulator | None = None
    """Simulated user that replies when the model answers without a tool call; None to end the conversation at that
    answer."""
    score: Scorer | None = None
    """Function `score(trajectory, task)`, sync or async, that returns the reward of a finished conversation: a number,
    or named parts."""

    _above_zero: ClassVar[tuple[str, ...]] = ("concurrency", "trajectory_timeout")

    @classmethod
    def remote(cls, **settings: Any) -> Any:
        """Create this rollout in a Ray actor, and return the actor's handle, for
        `ray.get(actor.__call__.remote(trajectories))`.

        If Ray is not running, it is started on this machine. `sampler` and `template` may be functions without
        arguments, which are then called in the actor. If a server needs a key, the environment variable with the key
        must be set on the actor's host.

        Raises:
            UsageError: Ray is not installed, a setting is unknown, or a setting cannot be sent to an actor.
        """
        from verbatim.rollouts.ray.actor import start_rollout

        return start_rollout(cls, settings)

    def __post_init__(self) -> None:
        for name in self._above_zero:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise UsageError(f"{name} = {value!r:.80}; expected a number above 0")
        # Validates the limits. Calls the base class's `_limits`, because that of a subclass reads the sampler, which
        # is not checked yet.
        ConversationRollout._limits(self)
        managers = self.tool_manager
        if not isinstance(self.sampling_params, SamplingParams):
            raise UsageError(f"sampling_params: {self.sampling_params!r:.80}; expected SamplingParams(max_tokens=512)")
        for given in managers if isinstance(managers, Sequence) else [managers]:
            if not isinstance(given, ToolManager | None):
                raise UsageError(f"tool_manager: {given!r:.80}; expected a ToolManager, such as ToolManager([search])")

    def __call__(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """Run every conversation to its end, and return one trajectory for each, in the same order.

        The input is not modified. If a trajectory failed, its field `error` has the reason.

        Args:
            trajectories: The conversations, each as an `Example`, as a `Trajectory`, or as a mapping with `messages`
                and optionally `tools`, `id` and any other fields.
            overrides: Settings that apply to this call only: `rollout(trajectories, max_turns=3)`.

        Raises:
            UsageError: `trajectories` is not a list of conversations, a setting is unknown, or the number of tool
                managers differs from the number of trajectories.
        """
        settings = self._override(overrides)

        async def all_of_them() -> list[Trajectory]:
            try:
                return await settings.run(trajectories)
            finally:
                await settings._hang_up()

        return run_in_program(all_of_them())

    async def run(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """Async version of `__call__`."""
        results: dict[int, Trajectory] = {}
        await self.run_each(trajectories, results.__setitem__, **overrides)
        return [results[index] for index in range(len(trajectories))]

    async def run_each(
        self, trajectories: Sequence[Conversation], finished: Callable[[int, Trajectory], object], **overrides: Any
    ) -> None:
        """Like `run`, but instead of collecting the trajectories, call `finished(index, trajectory)` for each
        trajectory as soon as it ends. An exception in `finished` is raised here; then the episodes still in flight
        are cancelled, and `finished` is called with their trajectories too."""
        settings = self._override(overrides)
        openings = read_openings(trajectories)
        offered = offered_tools(openings, settings.tool_manager)
        async with contextlib.AsyncExitStack() as stack:
            user = None
            if settings.user is not None:
                connection = await stack.enter_async_context(settings.user.api.connect())
                user = functools.partial(settings.user.answer, connection)
            begins = [
                ConversationEpisode(opening, tools, user, settings.score).start
                for opening, tools in zip(openings, offered, strict=True)
            ]
            await settings._run_all(openings, begins, finished)

    async def run_environment(
        self,
        environment: Environment,
        examples: Sequence[tuple[Example, int]],
        finished: Callable[[int, Trajectory], object],
        *,
        env: str = "",
        seed: int | None = None,
    ) -> None:
        """Play episodes of an environment. `finished` is called as in `run_each`.

        The environment has its own tools, user and score; its `score_group` is not called. An episode's seed is derived
        from `seed`, the example's id and the sample number.

        Args:
            environment: The environment.
            examples: Pairs of an example and a sample number. An example may occur several times.
            finished: Called with each trajectory's index in `examples` and the trajectory.
            env: The environment's name, which is stored in the trajectories.
            seed: Seed of the episodes; None for this rollout's seed.
        """
        if seed is None:
            seed = getattr(self, "seed", None) or 0
        openings = [
            Opening(
                messages=(),
                tools=(),
                task=example.payload,
                identity=RolloutIdentity(
                    example_id=example.id, trajectory_id=f"{example.id}-{sample}", sample_index=sample, env=env
                ),
            )
            for example, sample in examples
        ]
        begins = [
            functools.partial(environment.start, example, derive_seed(seed, "environment", example.id, sample))
            for example, sample in examples
        ]

        def settle(trajectory: Trajectory) -> Trajectory:
            return judged(environment, rewarded_by_its_turns(trajectory))

        await self._run_all(openings, begins, finished, settle)

    async def _run_all(
        self,
        openings: Sequence[Opening],
        begins: Sequence[Begin],
        finished: Callable[[int, Trajectory], object],
        settle: Settle = lambda trajectory: trajectory,
    ) -> None:
        """Run every episode, at most `concurrency` of them at a time."""
        # All workers share one iterator: a free worker takes the next episode.
        waiting = iter(zip(range(len(openings)), openings, begins, strict=True))
        traces: TraceFolder | None = None
        if self.trace_dir is not None:
            traces = TraceFolder(
                Path(self.trace_dir), trace_callback=self.trace_callback, success_callback=self.success_callback
            )
        with progress_bar(len(openings), self.progress) as advance:

            def ended(index: int, trajectory: Trajectory) -> None:
                finished(index, trajectory)
                advance(trajectory)

            async with self._engine() as start:

                async def work() -> None:
                    for index, opening, begin in waiting:
                        await _run(
                            start(index, opening), opening, begin, settle, traces, functools.partial(ended, index)
                        )

                num_workers = math.ceil(min(self.concurrency, len(openings)))
                await run_together(work() for _ in range(num_workers))

    @abc.abstractmethod
    def _engine(self) -> contextlib.AbstractAsyncContextManager[Start]:
        """Return the context manager in which one call of the rollout runs. Its value is the function that creates the
        episode loops."""

    async def _hang_up(self) -> None:  # noqa: B027  most engines hold nothing between calls
        """Close the connections that belong to the event loop, because the loop is about to end."""

    def _limits(self) -> EpisodeLimits:
        return EpisodeLimits(
            max_turns=self.max_turns,
            timeout=self.trajectory_timeout,
            tool_timeout=self.tool_timeout,
            tool_output_limit=self.tool_output_limit,
            tool_error=self.tool_error,
            max_malformed_retries=self.max_malformed_retries,
        )

    def _override(self: Self, overrides: Mapping[str, Any]) -> Self:
        names = [f.name for f in dataclasses.fields(self) if not f.name.startswith("_")]
        for name in overrides:
            if name not in names:
                hint = nearest(name, names) or "."
                raise UsageError(f"a rollout has no setting {name!r}{hint} There are {', '.join(names)}")
        return dataclasses.replace(self, **overrides)


async def _run(
    started: tuple[EpisodeLoop, int | None],
    opening: Opening,
    begin: Begin,
    settle: Settle,
    traces: TraceFolder | None,
    ended: Callable[[Trajectory], None],
) -> None:
    """Run one conversation to its end, and pass the trajectory to `ended`, even if the conversation is cancelled."""
    loop, seed = started
    identity = dataclasses.replace(opening.identity, seed=seed)
    episode = EpisodeRun(begin, loop, identity, timed=True)

    def result() -> Trajectory:
        found = episode.trajectory()
        info = {"task": dict(opening.task), **found.info} if opening.task else found.info
        return settle(found.replace(info=info, tools=opening.tools))

    try:
        await episode.run()
    except asyncio.CancelledError:
        trajectory = result()
        if traces is not None:
            traces.store(trajectory)
        ended(trajectory)
        raise
    trajectory = result()
    try:
        if traces is not None:
            # On a thread, because the callbacks are user code and may be slow.
            await asyncio.to_thread(traces.store, trajectory)
    finally:
        ended(trajectory)
