"""One episode from example to trajectory: whatever goes wrong stays on the trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from verbatim.environments.base import Environment, Episode, Reply
from verbatim.errors import ComponentError, EnvironmentFault, RolloutError
from verbatim.rollouts import supervised
from verbatim.rollouts.agent_loop import TOOLS_OFFERED, AgentLoop, EpisodeLimits, EpisodeOver
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rewards import add_reward, checked_reward, read_score
from verbatim.rollouts.supervised import Leash, LeftBehind, supervise
from verbatim.rollouts.tally import TOOL_FAULTS, TRACEBACK, failure_kind, traceback_tail
from verbatim.rollouts.teacher_loop import TeacherLoop
from verbatim.rollouts.user_calls import UserCalls
from verbatim.texts import LONGEST_ERROR, cut, shown
from verbatim.tools.manager import ToolManager, ToolOutcome
from verbatim.trajectory_json import why_not_json
from verbatim.types import (
    PARSE_STATUSES,
    Example,
    Message,
    ParseStatus,
    RolloutIdentity,
    StopReason,
    ToolCall,
    Trajectory,
)

logger = logging.getLogger(__name__)

CLOSING = 60.0
"""Seconds that an episode may take to close."""
LONGEST_STATE_KEY = 10_000
"""Characters of what names a state: every turn keeps one."""
TURN_REWARDS_SUM = "turn_rewards_sum_to_reward"
"""What an episode says of its rewards; kept in the trajectory's `info`."""


async def run_episode(
    *,
    environment: Environment,
    example: Example,
    seed: int,
    loop: AgentLoop | TeacherLoop,
    recorder: Recorder,
    limits: EpisodeLimits,
    identity: RolloutIdentity,
) -> Trajectory:
    """Run one episode and score it.

    The environment's code runs on a task of its own. It is cancelled at the episode's deadline; where it ignores that
    for `supervised.GRACE` seconds, it is left behind: the episode has failed, and the run goes on.

    Args:
        environment: Whose episode it is.
        example: What it is about.
        seed: Of the environment's own randomness.
        loop: Samples the turns into `recorder`.
        recorder: Holds the turns, also of an episode that fails.
        limits: Where it is cut off.
        identity: Which rollout it is, for the record.

    Returns:
        The trajectory. If the environment, a tool under its own control flow, or the engine failed, `error` says
        what happened and the turns up to there are kept. That holds for whatever the environment raises, SystemExit and
        KeyboardInterrupt included.

    Raises:
        asyncio.CancelledError: the run is shutting down; the recorder still holds what was sampled.
    """
    run = _EpisodeRun(environment, example, seed, loop, recorder, limits, identity)
    try:
        await supervise(run.run(), run.leash)
    except LeftBehind:
        run.was_left_behind()
        await run.close()
    except asyncio.CancelledError:
        if run.leash.told_to_end:
            raise
        run.fail(EnvironmentFault(f"{run.calls.now} cancelled the task that it runs on"))
    finally:
        await loop.end()
        recorder.close()
    return run.trajectory()


class _EpisodeRun:
    """One episode under way. What it holds is the record, at any time."""

    def __init__(
        self, environment: Environment, example: Example, seed: int, loop: AgentLoop | TeacherLoop,
        recorder: Recorder, limits: EpisodeLimits, identity: RolloutIdentity,
    ) -> None:  # fmt: skip
        self._environment, self._example, self._seed = environment, example, seed
        self._loop, self._recorder, self._limits, self._identity = loop, recorder, limits, identity
        self.leash = Leash(limits.timeout + supervised.GRACE)
        self.calls = UserCalls(self.leash)
        self._episode: Episode | None = None
        self._closing = False
        self._messages: list[Message] = []
        self._stop_reason: StopReason | None = None
        self._reward: float | None = None
        self._parts: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._error: str | None = None

    async def run(self) -> None:
        """Take it to its end; what goes wrong is in the record."""
        try:
            async with asyncio.timeout(self._limits.timeout) as self.calls.deadline:
                await self._act()
        except TimeoutError:
            self._error = f"timeout: the episode took more than {self._limits.timeout:g} s"
            self._stop_reason = StopReason.API_ERROR
        except RolloutError as fault:
            self.fail(fault)
        finally:
            await self._close()
            await self._loop.end()
            self._recorder.close()

    def fail(self, fault: RolloutError) -> None:
        """Something went wrong for good."""
        self._error, self._stop_reason = _said(fault), StopReason.API_ERROR
        _keep_traceback(self._info, fault)

    def was_left_behind(self) -> None:
        """The environment's code still runs, and nothing of what it does from now on counts."""
        # What it may still change must not be what is kept.
        self._messages, self._info = list(self._messages), dict(self._info)
        if self._closing:
            self._error = self._error or f"environment: close went on after {CLOSING:g} s, and was left behind"
            return
        self._error = (
            f"timeout: the episode took more than {self._limits.timeout:g} s: {self.calls.now} ignored its "
            "cancellation, and was left behind"
        )
        self._stop_reason = StopReason.API_ERROR

    async def close(self) -> None:
        """Close the episode of a task that was left behind before it came to that."""
        if not self._closing:
            self.leash = Leash(math.inf)
            self.calls = UserCalls(self.leash)
            with contextlib.suppress(LeftBehind):
                await supervise(self._close(), self.leash)

    def trajectory(self) -> Trajectory:
        """The record."""
        if self._error is None and self._recorder.late is not None:
            self._error, self._stop_reason = f"record: {self._recorder.late}", StopReason.API_ERROR
        return Trajectory.of(
            self._identity, turns=tuple(self._recorder.turns), messages=tuple(self._messages),
            reward=self._reward, reward_parts=self._parts, stop_reason=self._stop_reason,
            truncated=self._stop_reason.truncated if self._stop_reason else True, error=self._error, info=self._info,
            num_unrecorded_tokens=self._recorder.num_unrecorded_tokens,
        )  # fmt: skip

    async def _act(self) -> None:
        calls, loop, recorder = self.calls, self._loop, self._recorder
        with calls.guard("start"):
            # Known at once: one that comes after the deadline is closed too.
            self._episode = episode = await self._environment.start(self._example, self._seed)
        with calls.guard("the episode's messages"):
            self._messages.extend(_checked_messages(getattr(episode, "messages", None), "the episode's messages"))
            if getattr(episode, TURN_REWARDS_SUM, False):
                self._info[TURN_REWARDS_SUM] = True
            run = getattr(episode, "run", None)
        try:
            if run is not None:
                with calls.guard("run"):
                    await run(loop)
                self._stop_reason = StopReason.STOP
            else:
                self._stop_reason = await _converse(episode, loop, self._limits, self._messages, self._info, calls)
        except EpisodeOver as over:
            self._stop_reason = over.stop_reason
            await loop.end()  # what the environment has sampled beside the turn that ended it
        if await loop.end():
            raise recorder.went_on()
        if run is not None:
            self._messages = list(loop.messages())
        loop.finish()
        with calls.guard("info"):
            self._info.update(_checked_info(getattr(episode, "info", {})))
        if loop.offers_tools:
            self._info[TOOLS_OFFERED] = True
        draft = Trajectory.of(
            self._identity, turns=tuple(recorder.turns), messages=tuple(self._messages),
            stop_reason=self._stop_reason, truncated=self._stop_reason.truncated, info=self._info,
        )  # fmt: skip
        with calls.guard("score"):
            score = read_score(await episode.score(draft), "score")
        self._reward, self._parts = score

    async def _close(self) -> None:
        """Close the episode, exactly once; what goes wrong in it counts where nothing else has."""
        if self._episode is None or self._closing:
            return
        self._closing = self.leash.may_not_be_cancelled = True
        self.leash.within(CLOSING + supervised.GRACE)
        fault: RolloutError | None = None
        try:
            async with asyncio.timeout(CLOSING) as self.calls.deadline:
                with self.calls.guard("close"):
                    await self._episode.close()
        except TimeoutError:
            fault = EnvironmentFault(f"close took more than {CLOSING:g} s")
        except EpisodeOver as over:
            fault = EnvironmentFault(f"close sampled, and the episode was over: {over}")
        except RolloutError as raised:
            fault = raised
        if fault is not None and self._error is None:
            self._error = _said(fault)
            _keep_traceback(self._info, fault)


async def _converse(
    episode: Episode, loop: AgentLoop | TeacherLoop, limits: EpisodeLimits, messages: list[Message],
    info: dict[str, Any], calls: UserCalls,
) -> StopReason:  # fmt: skip
    """The usual control flow: tools answer calls, the environment answers everything else."""
    with calls.guard("the episode's tools"):
        try:
            offered: Any = episode.tools
            tools = offered if isinstance(offered, ToolManager) else ToolManager(offered)
        except (ComponentError, TypeError, AttributeError) as error:
            raise EnvironmentFault(f"the episode's tools: {cut(str(error))}") from error
    malformed_in_a_row = 0
    while True:
        try:
            with calls.guard("state_key"):
                key = _checked_state_key(episode.state_key())
            calls.now = "sampling"
            messages.append(await loop.sample(messages, tuple(tools.values()), state_key=key))
        except EpisodeOver as over:
            if over.message is not None:
                messages.append(over.message)
            raise
        turn = loop.last_turn
        if turn.tool_calls and loop.turns_left <= 0:
            return StopReason.MAX_TURNS  # the pending calls are not run
        started = time.perf_counter()
        if turn.tool_calls:
            calls.now = "a tool"
            answer, parse_status = await _run_tools(tools, turn.tool_calls, limits, info)
            malformed = all(call.status != "ok" for call in turn.tool_calls)
            malformed_in_a_row = malformed_in_a_row + 1 if malformed else 0
            ends = StopReason.MALFORMED if malformed_in_a_row > limits.max_malformed_retries else None
        else:
            with calls.guard("reply"):
                answer = _checked_reply(await episode.reply(messages[-1]))
            parse_status, malformed_in_a_row = "ok", 0
            ends = None if answer.messages else StopReason.STOP
        messages.extend(answer.messages)
        loop.amend_last_turn(
            reward=answer.reward, tool_seconds=time.perf_counter() - started, parse_status=parse_status
        )
        if answer.done:
            return StopReason.STOP
        if ends is not None:
            return ends


async def _run_tools(
    tools: ToolManager, calls: tuple[ToolCall, ...], limits: EpisodeLimits, info: dict[str, Any]
) -> tuple[Reply, ParseStatus]:
    """Run the calls in order, until one of them ends the episode; also the first thing wrong with any of them."""
    messages: list[Message] = []
    reward: float | None = None
    done = False
    parse_status: ParseStatus = "ok"
    for call in calls:
        outcome = await tools.dispatch(call, timeout=limits.tool_timeout, output_limit=limits.tool_output_limit)
        messages.append(outcome.message)
        reward = add_reward(reward, outcome.reward, f"tool {call.name}")
        kind = outcome.error_kind
        if kind in ("exception", "timeout") and limits.tool_error == "stop":
            raise EnvironmentFault(f"tool {call.name}: {outcome.message['content']}") from outcome.fault
        if kind == "timeout" or outcome.fault is not None:
            _note_tool_fault(info, outcome)
        if kind is not None:
            errors = info.setdefault("tool_errors", {})
            errors[kind] = errors.get(kind, 0) + 1
            if parse_status == "ok" and kind in PARSE_STATUSES:
                parse_status = cast(ParseStatus, kind)
        if outcome.done:
            done = True
            break
    return Reply(messages=messages, done=done, reward=reward), parse_status


def _note_tool_fault(info: dict[str, Any], outcome: ToolOutcome) -> None:
    said = outcome.message["content"].removeprefix("Error: ")[:500]
    tail = traceback_tail(outcome.fault)
    faults = info.setdefault(TOOL_FAULTS, {})
    fault = faults.setdefault(failure_kind(said), {"count": 0, "first": f"{said}\n{tail}" if tail else said})
    fault["count"] += 1


def _checked_reply(answer: Any) -> Reply:
    if not isinstance(answer, Reply):
        raise EnvironmentFault(f"reply returned {shown(answer)}; expected verbatim.environments.Reply")
    _checked_messages(answer.messages, "the reply's messages")
    if not isinstance(answer.done, bool | np.bool_):
        raise EnvironmentFault(f"reply returned done={shown(answer.done, 80)}; expected True or False")
    return dataclasses.replace(answer, reward=checked_reward(answer.reward, "reply"))


def _checked_state_key(key: Any) -> str | None:
    if key is not None and not isinstance(key, str):
        raise EnvironmentFault(f"state_key returned {shown(key)}; expected a string or None")
    if key is not None and len(key) > LONGEST_STATE_KEY:
        raise EnvironmentFault(f"state_key returned a text of {len(key):,} characters; expected at most "
                               f"{LONGEST_STATE_KEY:,}, for example a hash of it")  # fmt: skip
    return key


def _checked_info(info: Any) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info is {shown(info)}; expected a mapping of JSON values")
    why = why_not_json(info)
    if why is not None:
        raise EnvironmentFault(f"info is not JSON: {why}; expected texts, numbers, booleans, None, lists and mappings")
    return info


def _checked_messages(messages: Any, what: str) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise EnvironmentFault(f"{what}: {shown(messages)}; expected a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise EnvironmentFault(
                f'{what}: {shown(message)} at {index}; expected {{"role": ..., "content": ...}}'
            )
    return messages


def _keep_traceback(info: dict[str, Any], fault: RolloutError) -> None:
    """Where the user's code raised: the log quotes it, here or on another host."""
    if fault.__cause__ is not None:
        info[TRACEBACK] = traceback_tail(fault.__cause__)


def _said(fault: RolloutError) -> str:
    kind = {"EnvironmentFault": "environment", "SamplerFault": "sampler", "RecordError": "record",
            "TemplateFault": "template"}  # fmt: skip
    return f"{kind.get(type(fault).__name__, 'rollout')}: {cut(str(fault), 2 * LONGEST_ERROR)}"
