"""One episode from example to trajectory: whatever goes wrong stays on the trajectory."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from verbatim.environments.base import Environment, Episode, Reply, Score
from verbatim.errors import ComponentError, EnvironmentFault, ModelError, RolloutError
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rewards import add_reward, checked_reward, one_number
from verbatim.rollouts.tally import TOOL_FAULTS, TRACEBACK, failure_kind, traceback_tail
from verbatim.rollouts.teacher_loop import TeacherLoop
from verbatim.rollouts.turn_loop import TOOLS_OFFERED, AgentLoop, EpisodeLimits, EpisodeOver
from verbatim.tools.manager import ToolManager, ToolOutcome
from verbatim.types import PARSE_STATUSES, Example, Message, ParseStatus, StopReason, ToolCall, Trajectory

logger = logging.getLogger(__name__)

CLOSING = 60.0
"""Seconds that an episode may take to close."""
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
    identity: Mapping[str, Any],
) -> Trajectory:
    """Run one episode and score it.

    Args:
        environment: Whose episode it is.
        example: What it is about.
        seed: Of the environment's own randomness.
        loop: Samples the turns into `recorder`.
        recorder: Holds the turns, also of an episode that fails.
        limits: Where it is cut off.
        identity: `trajectory_id`, `group_id`, `sample_index`, `env`, `seed` of the record.

    Returns:
        The trajectory. If the environment, a tool under its own control flow, or the engine failed, `error` says
        what happened and the turns up to there are kept.

    Raises:
        asyncio.CancelledError: the run is shutting down; the recorder still holds what was sampled.
    """
    episode: Episode | None = None
    messages: list[Message] = []
    error: str | None = None
    stop_reason: StopReason | None = None
    reward: float | None = None
    parts: dict[str, float] = {}
    info: dict[str, Any] = {}
    try:
        async with asyncio.timeout(limits.timeout):
            episode = await _guarded("start", lambda: environment.start(example, seed))
            messages.extend(_checked_messages(getattr(episode, "messages", None), "the episode's messages"))
            if getattr(episode, TURN_REWARDS_SUM, False):
                info[TURN_REWARDS_SUM] = True
            try:
                run = getattr(episode, "run", None)
                if run is not None:
                    await _guarded("run", lambda: run(loop))
                    stop_reason = StopReason.STOP
                else:
                    stop_reason = await _converse(episode, loop, limits, messages, info)
            except EpisodeOver as over:
                stop_reason = over.stop_reason
                await loop.end()  # what the environment has sampled beside the turn that ended it
            if await loop.end():
                raise recorder.went_on()
            messages = messages if run is None else list(loop.messages())
            loop.finish()
            info.update(getattr(episode, "info", {}))
            if loop.offers_tools:
                info[TOOLS_OFFERED] = True
            draft = Trajectory(
                example_id=example.id, turns=tuple(recorder.turns), messages=tuple(messages), stop_reason=stop_reason,
                truncated=stop_reason.truncated, info=info, **identity,
            )  # fmt: skip
            reward, parts = _reward(await _guarded("score", lambda: episode.score(draft)))
    except TimeoutError:
        error, stop_reason = f"timeout: the episode took more than {limits.timeout:g} s", StopReason.API_ERROR
    except RolloutError as fault:
        error, stop_reason = f"{_kind(fault)}: {fault}", StopReason.API_ERROR
        _keep_traceback(info, fault)
    finally:
        if episode is not None:
            closing = await _close(episode)
            if closing is not None and error is None:
                error = f"{_kind(closing)}: {closing}"
                _keep_traceback(info, closing)
        await loop.end()
        recorder.close()
    if error is None and recorder.late is not None:
        error, stop_reason = f"record: {recorder.late}", StopReason.API_ERROR
    return Trajectory(
        example_id=example.id, turns=tuple(recorder.turns), messages=tuple(messages), reward=reward,
        reward_parts=parts, stop_reason=stop_reason, truncated=stop_reason.truncated if stop_reason else True,
        error=error, info=info, num_unrecorded_tokens=recorder.num_unrecorded_tokens, **identity,
    )  # fmt: skip


async def _converse(
    episode: Episode, loop: AgentLoop | TeacherLoop, limits: EpisodeLimits, messages: list[Message],
    info: dict[str, Any],
) -> StopReason:  # fmt: skip
    """The usual control flow: tools answer calls, the environment answers everything else."""
    try:
        offered: Any = episode.tools
        tools = offered if isinstance(offered, ToolManager) else ToolManager(offered)
    except (ComponentError, TypeError, AttributeError) as error:
        raise EnvironmentFault(f"the episode's tools: {error}") from error
    malformed_in_a_row = 0
    while True:
        try:
            key = _state_key(episode)
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
            answer, parse_status = await _run_tools(tools, turn.tool_calls, limits, info)
            malformed = all(call.status != "ok" for call in turn.tool_calls)
            malformed_in_a_row = malformed_in_a_row + 1 if malformed else 0
            ends = StopReason.MALFORMED if malformed_in_a_row > limits.max_malformed_retries else None
        else:
            answer = await _guarded("reply", lambda: episode.reply(messages[-1]))
            if not isinstance(answer, Reply):
                raise EnvironmentFault(f"reply returned {answer!r}; expected verbatim.environments.Reply")
            _checked_messages(answer.messages, "the reply's messages")
            if not isinstance(answer.done, bool | np.bool_):
                raise EnvironmentFault(f"reply returned done={answer.done!r:.80}; expected True or False")
            answer = dataclasses.replace(answer, reward=checked_reward(answer.reward, "reply"))
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


async def _guarded(what: str, call: Callable[[], Awaitable[Any]]) -> Any:
    """Run a piece of the user's environment; whatever it raises becomes an EnvironmentFault."""
    try:
        return await call()
    except (EpisodeOver, RolloutError, ModelError):  # a model that cannot do what is asked fails every episode alike
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # this episode is being cancelled, not something that the user's code awaited
        raise EnvironmentFault(f"{what} awaited something that was cancelled") from error
    except Exception as error:  # user code may raise anything; it is kept on the trajectory and counted
        raise EnvironmentFault(f"{what} raised {type(error).__name__}: {error}") from error


def _checked_messages(messages: Any, what: str) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise EnvironmentFault(f"{what}: {messages!r}; expected a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise EnvironmentFault(f'{what}: {message!r} at {index}; expected {{"role": ..., "content": ...}}')
    return messages


def _state_key(episode: Episode) -> str | None:
    try:
        return episode.state_key()
    except Exception as error:  # user code, as in `_guarded`
        raise EnvironmentFault(f"state_key raised {type(error).__name__}: {error}") from error


def _reward(score: Score) -> tuple[float | None, dict[str, float]]:
    if score is None:
        return None, {}
    try:
        parts = {str(name): one_number(value) for name, value in score.items()} if isinstance(score, Mapping) else {}
        reward = math.fsum(parts.values()) if isinstance(score, Mapping) else one_number(score)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(
            f"score returned {score!r:.200}; expected a number or {{part: number}} ({error})"
        ) from None
    if not math.isfinite(reward):
        raise EnvironmentFault(f"score returned {score!r}; expected a finite number")
    return reward, parts


async def _close(episode: Episode) -> RolloutError | EpisodeOver | None:
    """What went wrong in it."""
    try:
        async with asyncio.timeout(CLOSING):
            await _guarded("close", episode.close)
    except TimeoutError:
        return EnvironmentFault(f"close took more than {CLOSING:g} s")
    except (RolloutError, EpisodeOver) as fault:
        return fault
    return None


def _keep_traceback(info: dict[str, Any], fault: RolloutError | EpisodeOver) -> None:
    """Where the user's code raised: the log quotes it, here or on another host."""
    if fault.__cause__ is not None:
        info[TRACEBACK] = traceback_tail(fault.__cause__)


def _kind(fault: RolloutError | EpisodeOver) -> str:
    return {"EnvironmentFault": "environment", "SamplerFault": "sampler", "RecordError": "record"}.get(
        type(fault).__name__, "rollout"
    )
