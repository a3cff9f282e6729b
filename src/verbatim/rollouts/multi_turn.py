"""The multi-turn rollout engine as a function: conversations in, trajectories with exact ids out."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from verbatim.environments.base import Episode, Reply
from verbatim.errors import UsageError
from verbatim.inference.base import Sampler, SamplingParams
from verbatim.renderers.base import Renderer
from verbatim.rollouts.agent_loop import AgentLoop, EpisodeLimits
from verbatim.rollouts.base import Conversation, Opening, check_settings, read_openings, run_to_end
from verbatim.rollouts.episode import run_episode
from verbatim.rollouts.group import run_together
from verbatim.rollouts.offered import Managers, offered_tools
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.traces import TraceFolder
from verbatim.tools import ToolManager
from verbatim.types import Example, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiTurnRollout:
    """A `Rollout` over a token-in, token-out sampler: the model speaks, its tool calls are run, it speaks again, until
    it calls no tool.

    All trajectories of a call share the sampler's batch and advance independently: while one waits for a tool, the
    others are sampled, so a slow tool or a failing trajectory costs the others nothing. The training loop's episodes
    run on the same code.

    Example:
        >>> rollout = MultiTurnRollout(sampler=sampler, template=renderer, tool_manager=ToolManager([search]))
        >>> (result,) = rollout([{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}])
        >>> result["stop_reason"], result["turns"], result["labels"][:3]
        ('stop', 2, [-100, -100, -100])

    Raises:
        UsageError: a setting that cannot be.
    """

    sampler: Sampler
    """Token in, token out."""
    template: Renderer
    """The renderer of the sampler's model."""
    tool_manager: Managers = None
    """What runs the calls: one for all, or a list with one for each trajectory. Where it is None, a call is answered
    with an error, and counted."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are drawn."""
    max_turns: int = 6
    """Most turns of one trajectory; calls that are pending then are not run."""
    max_trajectory_tokens: int | None = None
    """Most tokens of one trajectory's context; None = as many as the sampler takes."""
    concurrency: int = 256
    """Most trajectories under way at a time."""
    seed: int = 0
    """Of the sampling. Each call, and each place in its list, draws differently."""
    trajectory_timeout: float = math.inf
    """Seconds for one trajectory, tools included."""
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
    _calls: Iterator[int] = field(default_factory=itertools.count, repr=False)

    @classmethod
    def remote(cls, **settings: Any) -> Any:
        """The handle of a Ray actor that holds such a rollout, for `ray.get(actor.__call__.remote(trajectories))`.

        Where Ray is not running it is started on this machine. `sampler` and `template` may be functions without
        arguments, which are called in the actor.

        Raises:
            UsageError: Ray is not installed, there is no such setting, or one of them cannot travel to an actor.
        """
        from verbatim.rollouts.ray.actor import start_rollout

        return start_rollout(cls, settings)

    def __post_init__(self) -> None:
        check_settings(self, ("max_turns", "max_trajectory_tokens", "concurrency", "trajectory_timeout",
                              "tool_timeout", "tool_output_limit"))  # fmt: skip
        for name, method, expected in (
            ("sampler", "generate", 'TorchSampler(folder, ...) or HttpSampler("http://127.0.0.1:8000")'),
            ("template", "render_ids", 'create_renderer("auto", tokenizer)'),
        ):
            value = getattr(self, name)
            if not callable(getattr(type(value), method, None)):
                raise UsageError(f"{name}: {value!r:.80} has no `{method}`; expected a {name} such as {expected}")

    def __call__(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """As many trajectories as were given, in the same order; what was given is not changed.

        A trajectory that failed says so in `error`.

        Args:
            trajectories: `Example`, `Trajectory`, or a mapping with `messages` (and `tools`, `id`, anything else).
            overrides: Settings for this call only: `rollout(trajectories, max_turns=3)`.

        Raises:
            UsageError: no list of conversations, an unknown setting, or not as many tool managers as trajectories.
        """

        async def all_of_them() -> list[Trajectory]:
            try:
                return await self.run(trajectories, **overrides)
            finally:  # this event loop ends, and its connections with it
                hang_up = getattr(overrides.get("sampler", self.sampler), "hang_up", None)
                if hang_up is not None:
                    await hang_up()

        return run_to_end(all_of_them)

    async def run(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """The same, awaited."""
        settings = self._override(overrides)
        openings = read_openings(trajectories)
        offered = offered_tools(openings, settings.tool_manager)
        seed = derive_seed(settings.seed, next(self._calls))
        slots = asyncio.Semaphore(settings.concurrency)
        traces: TraceFolder | None = None
        if settings.trace_dir is not None:
            traces = TraceFolder(Path(settings.trace_dir), trace_callback=settings.trace_callback,
                                 success_callback=settings.success_callback)  # fmt: skip

        async def one(index: int, opening: Opening, tools: ToolManager) -> Trajectory:
            async with slots:
                trajectory = await settings._play(opening, tools, derive_seed(seed, index), traces)
            if traces is not None:
                # Off the loop: the callbacks are the user's, and may take their time.
                await asyncio.to_thread(traces.store, trajectory)
            return trajectory

        return await run_together(
            one(index, opening, tools) for index, (opening, tools) in enumerate(zip(openings, offered, strict=True))
        )

    async def _play(self, opening: Opening, tools: ToolManager, seed: int, traces: TraceFolder | None) -> Trajectory:
        identity = dataclasses.replace(opening.identity, seed=seed)
        limits = self._limits()
        recorder = Recorder(self.sampler.vocab_size, trajectory_id=identity.trajectory_id)
        loop = AgentLoop(
            sampler=self.sampler, renderer=self.template, params=self.sampling_params, limits=limits,
            recorder=recorder, seed=seed,
        )  # fmt: skip
        try:
            trajectory = await run_episode(
                environment=_Openings(opening, tools),
                example=Example(id=identity.example_id),
                seed=seed,
                loop=loop,
                recorder=recorder,
                limits=limits,
                identity=identity,
            )
        except asyncio.CancelledError:
            if traces is not None:
                traces.store(Trajectory.of(
                    identity, turns=tuple(recorder.turns), messages=tuple(loop.messages()),
                    tools=opening.tools, num_unrecorded_tokens=recorder.num_unrecorded_tokens,
                    stop_reason=StopReason.CANCELLED, truncated=True, info={"task": dict(opening.task)},
                ))  # fmt: skip
            raise
        info = {"task": dict(opening.task), **trajectory.info} if opening.task else trajectory.info
        return trajectory.replace(info=info, tools=opening.tools)

    def _limits(self) -> EpisodeLimits:
        longest = self.sampler.context_length
        return EpisodeLimits(
            max_turns=self.max_turns, max_context=min(longest, self.max_trajectory_tokens or longest),
            timeout=self.trajectory_timeout, tool_timeout=self.tool_timeout, tool_output_limit=self.tool_output_limit,
            tool_error=self.tool_error, max_malformed_retries=self.max_malformed_retries,
        )  # fmt: skip

    def _override(self, overrides: Mapping[str, Any]) -> MultiTurnRollout:
        names = [f.name for f in dataclasses.fields(self) if not f.name.startswith("_")]
        for name in overrides:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"a rollout has no setting {name!r}{hint} There are {', '.join(names)}")
        return dataclasses.replace(self, **overrides)


class _Openings:
    """An environment of one opening, which ends when the model answers without calling a tool, and earns nothing."""

    def __init__(self, opening: Opening, tools: ToolManager) -> None:
        self._opening, self._tools = opening, tools

    def examples(self, split: str) -> Sequence[Example]:
        """None: openings are handed over one by one."""
        return ()

    async def start(self, example: Example, seed: int) -> Episode:
        """The conversation."""
        return _Answering(self._opening, self._tools)


class _Answering(Episode):
    def __init__(self, opening: Opening, tools: ToolManager) -> None:
        self.messages = opening.messages
        self.tools = tools  # type: ignore[assignment]  # a manager is taken as it is

    async def reply(self, message: Any) -> Reply:
        return Reply(done=True)

    async def score(self, trajectory: Trajectory) -> None:
        return None
