"""Runs one episode from example to trajectory; a failure is recorded on the trajectory."""

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
"""Seconds that an episode may take to close."""
TURN_REWARDS_SUM = "turn_rewards_sum_to_reward"
"""What an episode says of its rewards; kept in the trajectory's `info`."""


async def run_episode(
    *, environment: Environment, example: Example, seed: int, loop: EpisodeLoop, identity: RolloutIdentity
) -> Trajectory:
    """Run one episode and score it.

    If the environment, a tool under its own control flow, or the engine failed, the trajectory's `error` says what
    happened and the turns up to there are kept. So it does where the policy sampled nothing: such an episode is not
    scored. That holds for whatever the environment raises, SystemExit and
    KeyboardInterrupt included. At its deadline the environment's code is cancelled; where it ignores that for
    `supervised.GRACE` seconds, it is left behind: the episode has failed, and the run goes on. The seed is for the
    environment's own randomness; the turns are taken by the loop, under its limits, and held by its recorder.

    Raises:
        asyncio.CancelledError: the run is shutting down; the recorder still holds what was sampled.
    """
    run = EpisodeRun(lambda: environment.start(example, seed), loop, identity)
    await run.run()
    return run.trajectory()


class EpisodeRun:
    """One episode under way, as in `run_episode`. What it holds is the record, at any time. Where it is `timed`, the
    start and the seconds of each generation and tool call are kept in `info["timeline"]`."""

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
        self._calls = UserCalls(self._timeout + supervised.GRACE)
        self._dialogue = Dialogue(loop=loop, calls=self._calls, timed=timed)
        self._episode: Episode | None = None
        self._closing = False
        self._stop_reason: StopReason | None = None
        self._reward: float | None = None
        self._parts: dict[str, float] = {}
        self._agent_rewards: dict[str, float] = {}
        self._error: str | None = None

    async def run(self) -> None:
        """Take the episode to its end; what goes wrong is in the record, also where the caller is cancelled."""
        try:
            await supervise(self._run(), self._calls)
        except LeftBehind:
            self._was_left_behind()
            await self._close_after_all()
        except asyncio.CancelledError:
            if self._calls.told_to_end:
                self._stop_reason = StopReason.CANCELLED
                raise
            self._fail(EnvironmentFault(f"{self._calls.now} cancelled the task that it runs on"))
        finally:
            await self._loop.end()
            self._recorder.close()
        if self._error is None and self._recorder.late is not None:
            self._fail(self._recorder.late)

    def trajectory(self) -> Trajectory:
        """The record, as it is now."""
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
            self._note(fault)  # how it ended is known
        except RolloutError as fault:
            with contextlib.suppress(RolloutError, TimeoutError):  # what it has found out; what failed first is told
                self._take_info()
            self._fail(fault)
        finally:
            await self._close()
            await self._loop.end()
            self._recorder.close()

    async def _act(self) -> None:
        calls, loop, dialogue = self._calls, self._loop, self._dialogue
        with calls.guard("start"):
            # Known at once: one that comes after the deadline is closed too.
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
            await loop.end()  # what the environment has sampled beside the turn that ended it
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
        self._take_info()  # scoring may add to it: what a judge has spent
        self._reward, self._parts, self._agent_rewards = scores

    def _take_info(self) -> None:
        with self._calls.guard("info"):
            self._dialogue.info.update(_checked_info(getattr(self._episode, "info", {})))

    def _fail(self, fault: RolloutError) -> None:
        """Record a fault that ends the episode."""
        self._stop_reason = StopReason.API_ERROR
        self._note(fault)

    def _was_left_behind(self) -> None:
        """The environment's code still runs, and nothing of what it does from now on counts."""
        # What it may still change must not be what is kept.
        self._dialogue = copy.copy(self._dialogue)
        self._dialogue.messages, self._dialogue.info = list(self._dialogue.messages), dict(self._dialogue.info)
        if self._closing:
            self._error = self._error or f"environment: close went on after {CLOSING:g} s, and was left behind"
            return
        self._error = (
            f"timeout: the episode took more than {self._timeout:g} s: {self._calls.now} ignored its "
            "cancellation, and was left behind"
        )
        self._stop_reason = StopReason.API_ERROR

    async def _close_after_all(self) -> None:
        """Close the episode of a task that was left behind before it came to that."""
        if not self._closing:
            self._calls = UserCalls(math.inf)
            with contextlib.suppress(LeftBehind):
                await supervise(self._close(), self._calls)

    async def _close(self) -> None:
        """Close the episode, exactly once; what goes wrong in it counts where nothing else has."""
        if self._episode is None or self._closing:
            return
        if getattr(type(self._episode), "close", None) is Episode.close and "close" not in vars(self._episode):
            self._closing = True  # nothing to release
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
            fault = EnvironmentFault(f"close sampled, and the episode was over: {over}")
        except RolloutError as raised:
            fault = raised
        if fault is not None and self._error is None:
            self._note(fault)

    def _note(self, fault: RolloutError) -> None:
        """Make the fault the trajectory's error: its kind, and what it says. Where the user's code raised is kept too:
        the log quotes it, here or on another host."""
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
    """A copy: the environment may go on to change its own."""
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info is {shown(info)}; expected a mapping of JSON values")
    why = why_not_json(info)
    if why is not None:
        raise EnvironmentFault(f"info is not JSON: {why}")
    return dict(copied(info, "info", of_info=True))
