"""Runs conversations with any episode loop: conversations in, trajectories out."""

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
"""Starts an episode."""
Settle: TypeAlias = Callable[[Trajectory], Trajectory]
"""Adds what follows from a finished trajectory: its reward, its success."""
Start: TypeAlias = Callable[[int, Opening], tuple[EpisodeLoop, int | None]]
"""Makes the loop of the episode at this place in the list; and the seed that its trajectory names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ConversationRollout(abc.ABC):
    """The settings that all rollout engines have, and what a call does with them; a UsageError names a wrong one."""

    tool_manager: Managers = None
    """What runs the calls: one for all, or a list with one for each trajectory. Without one, a call is answered with an
    error, and counted."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are drawn."""
    max_turns: int = EpisodeLimits.max_turns
    """Most turns of one trajectory; calls that are pending then are not run."""
    concurrency: int
    """Most trajectories under way at a time."""
    trajectory_timeout: float
    """Seconds for one trajectory, tools included."""
    tool_timeout: float = EpisodeLimits.tool_timeout
    """Seconds for one tool call."""
    tool_output_limit: int = EpisodeLimits.tool_output_limit
    """Characters of one tool answer."""
    tool_error: Literal["message", "stop"] = EpisodeLimits.tool_error
    """What a tool that raises or hangs does: tells the model, or ends the trajectory as `api_error`."""
    max_malformed_retries: int = EpisodeLimits.max_malformed_retries
    """Turns in a row that may hold nothing but unreadable calls; one more ends the trajectory as "malformed"."""
    trace_dir: str | Path | None = None
    """Where each trajectory is stored as a file of its own, as soon as it ends; None stores none."""
    trace_callback: Callable[[Trajectory], Any] | None = None
    """Whether a trajectory is stored; None stores all."""
    success_callback: Callable[[Trajectory], Any] | None = None
    """Whether its file is called `ok-` or `fail-`; None: whether it ended of itself, without an error."""
    progress: bool | None = None
    """Whether a bar is drawn; None: where standard error is a terminal."""
    user: UserSimulator | None = None
    """Answers when the model speaks without calling a tool; None: the conversation ends there."""
    score: Scorer | None = None
    """`score(trajectory, task)`, plain or async: the reward of a finished conversation, or its named parts."""

    _above_zero: ClassVar[tuple[str, ...]] = ("concurrency", "trajectory_timeout")

    @classmethod
    def remote(cls, **settings: Any) -> Any:
        """The handle of a Ray actor that holds such a rollout, for `ray.get(actor.__call__.remote(trajectories))`.

        Where Ray is not running it is started on this machine. A `sampler` and a `template` may be functions without
        arguments, which are called in the actor. The environment variable of a server's key has to be set on the
        actor's host.

        Raises:
            UsageError: Ray is not installed, there is no such setting, or one of them cannot be sent to an actor.
        """
        from verbatim.rollouts.ray.actor import start_rollout

        return start_rollout(cls, settings)

    def __post_init__(self) -> None:
        for name in self._above_zero:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise UsageError(f"{name} = {value!r:.80}; expected a number above 0")
        ConversationRollout._limits(self)  # refuses what is no limit
        managers = self.tool_manager
        if not isinstance(self.sampling_params, SamplingParams):
            raise UsageError(f"sampling_params: {self.sampling_params!r:.80}; expected SamplingParams(max_tokens=512)")
        for given in managers if isinstance(managers, Sequence) else [managers]:
            if not isinstance(given, ToolManager | None):
                raise UsageError(f"tool_manager: {given!r:.80}; expected a ToolManager, such as ToolManager([search])")

    def __call__(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """As many trajectories as were given, in the same order; what was given is not changed.

        A trajectory that failed says so in `error`.

        Args:
            trajectories: `Example`, `Trajectory`, or a mapping with `messages` (and `tools`, `id`, anything else).
            overrides: Settings for this call only: `rollout(trajectories, max_turns=3)`.

        Raises:
            UsageError: no list of conversations, an unknown setting, or not as many tool managers as trajectories.
        """
        settings = self._override(overrides)

        async def all_of_them() -> list[Trajectory]:
            try:
                return await settings.run(trajectories)
            finally:
                await settings._hang_up()

        return run_in_program(all_of_them())

    async def run(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """The same, awaited."""
        results: dict[int, Trajectory] = {}
        await self.run_each(trajectories, results.__setitem__, **overrides)
        return [results[index] for index in range(len(trajectories))]

    async def run_each(
        self, trajectories: Sequence[Conversation], finished: Callable[[int, Trajectory], object], **overrides: Any
    ) -> None:
        """The same, holding none: `finished` gets each with its place in the list, as soon as it ends. What it raises
        is raised; what is under way then is cancelled, and given to it as such."""
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
        """Play episodes of an environment; `finished` is as for `run_each`.

        The environment has tools, a user and a score of its own; `score_group` is not called. An episode's seed is made
        of `seed`, the example and the number of the sample.

        Args:
            environment: The environment.
            examples: Each with the number of the sample: an example may be played several times.
            finished: Gets each trajectory with its place in `examples`.
            env: The environment's name, for the trajectories.
            seed: Of the episodes; None: this rollout's own.
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
        """Run every episode, `concurrency` of them at a time."""
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
        """Starts the episodes of one call for as long as the block lasts."""

    async def _hang_up(self) -> None:  # noqa: B027  most engines hold nothing between calls
        """Close what belongs to an event loop that ends."""

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
    """Take one conversation to its end, and hand it over, also where it is cancelled."""
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
            # Off the loop: the callbacks are the user's, and may take their time.
            await asyncio.to_thread(traces.store, trajectory)
    finally:
        ended(trajectory)
