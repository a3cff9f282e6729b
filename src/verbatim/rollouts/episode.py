"""Runs one episode, from example to trajectory. Failures are recorded in the trajectory, not raised."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verbatim.core.errors import (
    EnvironmentFault,
    JudgeFailed,
    NothingSampled,
    ProgramFault,
    RecordError,
    RolloutError,
    SamplerFault,
    TemplateFault,
)
from verbatim.core.texts import LONGEST_ERROR, cut_without_secrets, shown
from verbatim.core.trajectory_json import why_not_json
from verbatim.core.types import Example, RolloutIdentity, StopReason, Trajectory
from verbatim.environments.environment import Environment, Episode
from verbatim.rollouts import supervised
from verbatim.rollouts.copies import copied
from verbatim.rollouts.dialogue import Dialogue, awaitable
from verbatim.rollouts.episode_stats import NO_TURNS, TRACEBACK, traceback_tail
from verbatim.rollouts.loop import TOOLS_OFFERED, EpisodeLoop, EpisodeOver
from verbatim.rollouts.rewards import read_agent_scores
from verbatim.rollouts.supervised import LeftBehind, UserCalls, supervise

CLOSING = 60.0
"""Timeout of `Episode.close` in seconds."""
TURN_REWARDS_SUM = "turn_rewards_sum_to_reward"
"""Name of an episode's attribute, and key of `Trajectory.info`. The value is True if the rewards of the episode's turns
sum to its reward."""


async def run_episode(
    *, environment: Environment, example: Example, seed: int, loop: EpisodeLoop, identity: RolloutIdentity
) -> Trajectory:
    """Run one episode and score it.

    A failure of the environment, of the engine, or of a tool that the environment itself calls ends the episode. The
    message of the failure is stored in the trajectory's `error`, and the turns so far are kept. Any
    exception of the environment is a failure, including SystemExit and KeyboardInterrupt. An episode in which the
    policy sampled nothing fails too, and is not scored. At the episode's deadline the environment's code is cancelled.
    If the code is still running `supervised.GRACE` seconds later, the episode fails, its task is abandoned, and the run
    continues.

    Args:
        environment: Starts the episode.
        example: The example to play.
        seed: Seed of the environment's own randomness.
        loop: Samples the turns within the episode's limits, and records them.
        identity: Identity of the trajectory.

    Raises:
        asyncio.CancelledError: the run is shutting down; the recorder still holds the sampled turns.
    """
    run = EpisodeRun(lambda: environment.start(example, seed), loop, identity)
    await run.run()
    return run.trajectory()


class EpisodeRun:
    """One episode, which runs as the docstring of `run_episode` says; `trajectory()` may be called at any time. If
    `timed` is True, `info["timeline"]` has the start and the duration of each generation and tool call."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Episode]],
        loop: EpisodeLoop,
        identity: RolloutIdentity,
        *,
        timed: bool = False,
    ) -> None:
        self._start, self._loop, self._identity = start, loop, identity
        self._recorder, self._timeout = loop.recorder, loop.limits.timeout
        self._calls = UserCalls(self._timeout + supervised.GRACE)  # cancelled at the timeout, abandoned after the grace
        self._dialogue = Dialogue(loop=loop, calls=self._calls, timed=timed)
        self._episode: Episode | None = None
        self._closing = False
        self._stop_reason: StopReason | None = None
        self._reward: float | None = None
        self._parts: dict[str, float] = {}
        self._agent_rewards: dict[str, float] = {}
        self._error: str | None = None

    async def run(self) -> None:
        """Run the episode to its end. Failures are recorded in the trajectory, even if the caller is cancelled."""
        try:
            await supervise(self._run(), self._calls)
        except LeftBehind:
            self._was_left_behind()
            await self._close_after_all()
        except asyncio.CancelledError:
            # Only a cancellation from outside may propagate: if environment code cancels its own task, that must not
            # look like a shutdown of the run.
            if self._calls.told_to_end:
                self._stop_reason = StopReason.CANCELLED
                raise
            self._fail(EnvironmentFault(f"{self._calls.now} cancelled its own task"))
        finally:
            await self._loop.end()
            self._recorder.close()
        if self._error is None and self._recorder.late is not None:
            self._fail(self._recorder.late)

    def trajectory(self) -> Trajectory:
        """Return the trajectory as recorded so far."""
        return Trajectory.of(
            self._identity,
            turns=tuple(self._recorder.turns),
            messages=self._dialogue.kept(),
            reward=self._reward,
            reward_parts=self._parts,
            agent_rewards=self._agent_rewards,
            stop_reason=self._stop_reason,
            truncated=self._stop_reason.truncated if self._stop_reason else True,
            error=self._error,
            info={**self._loop.info, **self._dialogue.info},
            num_unrecorded_tokens=self._recorder.num_unrecorded_tokens,
            num_unrecorded_turns=self._loop.num_unrecorded_turns,
        )

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._timeout) as self._calls.deadline:
                await self._act()
        except TimeoutError:
            self._error = f"timeout: the episode took more than {self._timeout:g} s"
            self._stop_reason = StopReason.API_ERROR
        except NothingSampled as fault:
            self._note(fault)  # keeps the stop reason, which is already known
        except RolloutError as fault:
            # `info` may explain the failure. An error while it is read would hide the first one, so that error is
            # dropped.
            with contextlib.suppress(RolloutError, TimeoutError):
                self._take_info()
            self._fail(fault)
        finally:
            await self._close()
            await self._loop.end()
            self._recorder.close()

    async def _act(self) -> None:
        calls, loop, dialogue = self._calls, self._loop, self._dialogue
        with calls.guard("start"):
            # Assigned before any check, so that an episode that starts after the deadline is closed too.
            self._episode = episode = await self._start()
        with calls.guard("the episode's messages"):
            dialogue.take(getattr(episode, "messages", None), "the episode's messages")
            if getattr(episode, TURN_REWARDS_SUM, False):
                dialogue.info[TURN_REWARDS_SUM] = True
            run = getattr(episode, "run", None)
        try:
            if run is not None:
                with calls.guard("run"):
                    await run(loop)
                self._stop_reason = StopReason.STOP
            else:
                self._stop_reason = await dialogue.run(episode)
        except EpisodeOver as over:
            self._stop_reason = over.stop_reason
            await loop.end()  # other turns that the environment was sampling at the same time
        if await loop.end():
            raise self._recorder.went_on()
        if run is not None:
            shown = "main" if "main" in loop.agents else next(iter(loop.agents), "main")
            dialogue.messages = list(loop.messages(shown))
        loop.finish()
        self._take_info()
        if loop.offers_tools:
            dialogue.info[TOOLS_OFFERED] = True
        if (why := loop.why_nothing_sampled(self._stop_reason)) is not None:
            raise NothingSampled(why)
        draft = self.trajectory()
        with calls.guard("score"):
            score = await awaitable(episode.score(draft), "score(self, trajectory)")
            scores = read_agent_scores(score, "score")
        self._take_info()  # again: scoring may add to `info`, for example a judge's usage
        self._reward, self._parts, self._agent_rewards = scores

    def _take_info(self) -> None:
        with self._calls.guard("info"):
            self._dialogue.info.update(_checked_info(getattr(self._episode, "info", {})))

    def _fail(self, fault: RolloutError) -> None:
        """Record a fault that ends the episode."""
        self._stop_reason = StopReason.API_ERROR
        self._note(fault)

    def _was_left_behind(self) -> None:
        """Record that the environment's code ignored its cancellation. What the code does from now on does not
        count."""
        # The abandoned code still has a reference to the dialogue and may append to it, so keep a copy.
        self._dialogue = copy.copy(self._dialogue)
        self._dialogue.messages, self._dialogue.info = list(self._dialogue.messages), dict(self._dialogue.info)
        if self._closing:
            self._error = self._error or f"environment: close did not end within {CLOSING:g} s, and was abandoned"
            return
        self._error = (
            f"timeout: the episode took more than {self._timeout:g} s: {self._calls.now} ignored its "
            "cancellation, and was abandoned"
        )
        self._stop_reason = StopReason.API_ERROR

    async def _close_after_all(self) -> None:
        """Close the episode if its task was abandoned before the task called `close`."""
        if not self._closing:
            self._calls = UserCalls(math.inf)
            with contextlib.suppress(LeftBehind):
                await supervise(self._close(), self._calls)

    async def _close(self) -> None:
        """Close the episode, once only. If closing fails, the failure becomes the trajectory's error, unless the
        trajectory already has an error."""
        if self._episode is None or self._closing:
            return
        if getattr(type(self._episode), "close", None) is Episode.close and "close" not in vars(self._episode):
            self._closing = True  # the inherited `close` does nothing, so save the timeout and the guard
            return
        self._closing = self._calls.may_not_be_cancelled = True
        self._calls.within(CLOSING + supervised.GRACE)
        fault: RolloutError | None = None
        try:
            async with asyncio.timeout(CLOSING) as self._calls.deadline:
                with self._calls.guard("close"):
                    await awaitable(self._episode.close(), "close(self)")
        except TimeoutError:
            fault = EnvironmentFault(f"close took more than {CLOSING:g} s")
        except EpisodeOver as over:
            fault = EnvironmentFault(f"close tried to sample after the episode was over: {over}")
        except RolloutError as raised:
            fault = raised
        if fault is not None and self._error is None:
            self._note(fault)

    def _note(self, fault: RolloutError) -> None:
        """Set the trajectory's error to the kind and message of the fault, and keep the traceback of the user's
        exception. The log quotes the traceback. The process that writes the log may run on a different host, which gets
        only the trajectory."""
        kinds = {
            EnvironmentFault: "environment",
            JudgeFailed: "judge",
            SamplerFault: self._loop.engine,
            RecordError: "record",
            NothingSampled: NO_TURNS,
            TemplateFault: "template",
        }
        kind = fault.kind if isinstance(fault, ProgramFault) else kinds.get(type(fault), "rollout")
        self._error = f"{kind}: {cut_without_secrets(str(fault), 2 * LONGEST_ERROR)}"
        if fault.__cause__ is not None:
            self._dialogue.info[TRACEBACK] = traceback_tail(fault.__cause__)


def _checked_info(info: Any) -> Mapping[str, Any]:
    """Check `info`, and return a copy of it, because the environment may go on modifying the original."""
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info is {shown(info)}; expected a mapping of JSON values")
    why = why_not_json(info)
    if why is not None:
        raise EnvironmentFault(f"info is not JSON: {why}")
    return dict(copied(info, "info", of_info=True))
