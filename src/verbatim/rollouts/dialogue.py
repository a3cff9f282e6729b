"""Runs the default control flow of an episode. The model takes a turn; then tools answer its calls or, if it made none,
the environment replies."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from verbatim.core.errors import ComponentError, EnvironmentFault
from verbatim.core.texts import cut, shown
from verbatim.core.types import PARSE_STATUSES, Message, ParseStatus, StopReason, ToolCall
from verbatim.core.user_code import drop_tracebacks
from verbatim.core.user_values import why_refused
from verbatim.environments.environment import Episode, Reply
from verbatim.environments.tools.manager import ToolManager, ToolOutcome
from verbatim.rollouts.copies import is_plain, refuse
from verbatim.rollouts.episode_stats import TOOL_FAULTS, failure_kind, traceback_tail
from verbatim.rollouts.loop import EpisodeLoop
from verbatim.rollouts.rewards import add_reward, checked_reward
from verbatim.rollouts.supervised import UserCalls
from verbatim.rollouts.turn_arguments import checked_state_key

TIMELINE = "timeline"
"""Key of `Trajectory.info`. Its value has the start and the duration, in seconds, of each generation and tool call."""


class Dialogue:
    """The conversation of one episode. `messages` and `info` may be read at any time, even after a failure."""

    def __init__(self, *, loop: EpisodeLoop, calls: UserCalls, timed: bool) -> None:
        self._loop, self._limits, self._calls = loop, loop.limits, calls
        self._timeline: list[dict[str, Any]] | None = [] if timed else None
        self._began = time.perf_counter()
        self._num_turns = 0
        self.messages: list[Message] = []
        """The conversation so far."""
        self.info: dict[str, Any] = {}
        """Entries for the trajectory's `info`: tool errors, tool faults, and the timeline."""

    def take(self, messages: Any, what: str) -> None:
        """Append an environment's messages to the conversation.

        Args:
            messages: The messages, which are not yet checked.
            what: Name of the messages in the error.

        Raises:
            EnvironmentFault: `messages` is not a list of messages, or one of them cannot be kept in a trajectory.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise EnvironmentFault(f"{what}: {shown(messages)}; expected a list of messages")
        for index, message in enumerate(messages):
            is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            may_be_silent = is_message and message.get("tool_calls") and not self._loop.needs_content
            if not is_message or not ("content" in message or may_be_silent):
                raise EnvironmentFault(f'{what}: {shown(message)} at {index}; expected {{"role": ..., "content": ...}}')
            refuse(message, f"{what}, at {index}")
        self.messages.extend(messages)

    def kept(self) -> tuple[Message, ...]:
        """Return the messages for the trajectory. The environment owns them and may have changed them since they were
        checked: a message that can no longer be kept is replaced by a message that says why."""
        return tuple(message if is_plain(message) else _kept(message) for message in self.messages)

    async def run(self, episode: Episode) -> StopReason:
        """Take turns until the episode ends.

        Returns:
            The reason why the episode ended.

        Raises:
            EpisodeOver: a limit cut the episode off.
        """
        with self._calls.guard("the episode's tools"):
            tools = _checked_tools(episode)
        malformed_in_a_row = 0
        self._loop.in_order = True
        while True:
            calls = await self._speak(episode, tools)
            if calls and self._loop.turns_left <= 0:
                return StopReason.MAX_TURNS  # the pending calls are not run: the model could not read the results
            if not calls and self._loop.turns_left <= 0 and not getattr(episode, "hears_last_turn", True):
                return StopReason.MAX_TURNS
            started = time.perf_counter()
            parse_status: ParseStatus = "ok"
            if calls:
                reply, parse_status = await self._run_tools(tools, calls)
            else:
                with self._calls.guard("reply"):
                    reply = _checked_reply(await awaitable(episode.reply(self.messages[-1]), "reply(self, message)"))
                    self.take(reply.messages, "the reply's messages")
            seconds = time.perf_counter() - started
            self._loop.amend_last_turn(reward=reply.reward, tool_seconds=seconds, parse_status=parse_status)
            if reply.done or not (calls or reply.messages):
                return StopReason.STOP
            unreadable = bool(calls) and all(call.status != "ok" for call in calls)
            malformed_in_a_row = malformed_in_a_row + 1 if unreadable else 0
            if malformed_in_a_row > self._limits.max_malformed_retries:
                return StopReason.MALFORMED

    async def _speak(self, episode: Episode, tools: ToolManager) -> tuple[ToolCall, ...]:
        """Sample one turn, and return the tool calls in it."""
        with self._calls.guard("state_key"):
            key = checked_state_key(episode.state_key(), "state_key returned")
        self._calls.now = "sampling"
        entry = self._enter("generation")
        try:
            await self._loop.sample(self.messages, tuple(tools.values()), state_key=key)
        finally:
            # In `finally`, because a turn that was cut off or could not be recorded raises, and its message is kept
            # too.
            self._leave(entry)
            answer = self._loop.last_answer
            if answer is not None:
                self.messages.append(answer.message)
        assert answer is not None
        self._num_turns += 1
        return answer.tool_calls

    async def _run_tools(self, tools: ToolManager, calls: Sequence[ToolCall]) -> tuple[Reply, ParseStatus]:
        """Run the calls in order until one ends the episode. Return the reply, and the first parse status other than
        "ok"."""
        limits, reward = self._limits, None
        parse_status: ParseStatus = "ok"
        self._calls.now = "a tool"
        for call in calls:
            entry = self._enter("tool", name=call.name, id=call.id)
            try:
                outcome = await tools.dispatch(call, timeout=limits.tool_timeout, output_limit=limits.tool_output_limit)
            finally:
                self._leave(entry)
            self.messages.append(outcome.message)
            kind = outcome.error_kind
            if kind is not None:
                entry["error"] = kind
                self._note_error(call, outcome, kind)
            if parse_status == "ok" and kind in PARSE_STATUSES:
                parse_status = cast(ParseStatus, kind)
            reward = add_reward(reward, outcome.reward, f"tool {call.name}")
            if outcome.reward is not None:
                entry["reward"] = float(outcome.reward)
            if outcome.done:
                return Reply(done=True, reward=reward), parse_status
        return Reply(reward=reward), parse_status

    def _note_error(self, call: ToolCall, outcome: ToolOutcome, kind: str) -> None:
        """Count a failed call. With `tool_error = "stop"`, a tool that raised or timed out ends the episode."""
        errors = self.info.setdefault("tool_errors", {})
        errors[kind] = errors.get(kind, 0) + 1
        if kind in ("exception", "timeout") and self._limits.tool_error == "stop":
            raise EnvironmentFault(f"tool {call.name}: {outcome.message['content']}") from outcome.fault
        if kind == "timeout" or outcome.fault is not None:
            said = outcome.message["content"].removeprefix("Error: ")[:500]
            tail = traceback_tail(outcome.fault)
            drop_tracebacks(outcome.fault)  # a traceback keeps the frames, and all they refer to, alive
            faults = self.info.setdefault(TOOL_FAULTS, {})
            first = f"{said}\n{tail}" if tail else said
            faults.setdefault(failure_kind(said), {"count": 0, "first": first})["count"] += 1

    def _enter(self, what: str, **about: Any) -> dict[str, Any]:
        """Begin an entry of the timeline, whose times are in seconds since the start of the episode. If there is no
        timeline, return a dict that is discarded."""
        if self._timeline is None:
            return {}
        start = time.perf_counter() - self._began
        entry = {"turn": self._num_turns - (what == "tool"), "what": what, **about, "start": start}
        self._timeline.append(entry)
        self.info[TIMELINE] = self._timeline
        return entry

    def _leave(self, entry: dict[str, Any]) -> None:
        """Complete an entry of the timeline by adding its duration."""
        if self._timeline is not None:
            entry["seconds"] = time.perf_counter() - self._began - entry["start"]


def awaitable(given: Any, method: str) -> Any:
    """Return `given`, the awaitable that a method of an episode returned. Raise an EnvironmentFault if `given` is not
    awaitable, because the method is not async."""
    if not inspect.isawaitable(given):
        raise EnvironmentFault(f"{method.partition('(')[0]} is a plain method; expected `async def {method}`")
    return given


def _kept(message: Message) -> Message:
    if (why := why_refused(message)) is None:
        return message
    role = message.get("role")
    return {"role": role if isinstance(role, str) else "user", "content": f"(this message is not kept: {why})"}


def _checked_tools(episode: Episode) -> ToolManager:
    try:
        offered: Any = episode.tools
        return offered if isinstance(offered, ToolManager) else ToolManager(offered)
    except (ComponentError, TypeError, AttributeError) as error:
        raise EnvironmentFault(f"the episode's tools: {cut(str(error))}") from error


def _checked_reply(answer: Any) -> Reply:
    if not isinstance(answer, Reply):
        raise EnvironmentFault(f"reply returned {shown(answer)}; expected verbatim.environments.Reply")
    if not isinstance(answer.done, bool | np.bool_):
        raise EnvironmentFault(f"reply returned done={shown(answer.done, 80)}; expected True or False")
    return dataclasses.replace(answer, reward=checked_reward(answer.reward, "reply"))
