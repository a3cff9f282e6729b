"""The episode of a given conversation, with its tools, simulated user and scorer."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from verbatim.core.errors import UsageError
from verbatim.core.types import Message, Trajectory
from verbatim.environments.environment import Episode, Reply, Score
from verbatim.environments.tools import Tool, ToolArgumentsError, ToolManager, ToolResult
from verbatim.rollouts.rollout import Opening

logger = logging.getLogger(__name__)

Managers: TypeAlias = ToolManager | Sequence[ToolManager | None] | None
"""One tool manager for all conversations, or a list with one manager for each conversation. If a manager is None, every
call is answered with an error."""
Scorer: TypeAlias = Callable[[Trajectory, Mapping[str, Any]], Any]
"""Function that returns a reward, given a finished trajectory and the task's own fields (see `Opening.task`)."""
User: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any], Counter[str]], Awaitable[str | None]]
"""`UserSimulator.answer` with an open connection already bound to it."""


class ConversationEpisode(Episode):
    """An episode that ends when the model answers without a tool call or, if there is a simulated user, when the user
    ends it. The scorer gives the reward."""

    def __init__(self, opening: Opening, tools: ToolManager, user: User | None, scorer: Scorer | None) -> None:
        self.messages = opening.messages
        self.tools = tools  # type: ignore[assignment]  # a manager is used as it is
        self._task, self._user, self._scorer = opening.task, user, scorer
        self._spoken = [message for message in opening.messages if message["role"] in ("user", "assistant")]
        self._usage: Counter[str] = Counter()
        self.info = {} if user is None else {"user_usage": self._usage}
        # A simulated user is not asked after the last turn: that would cost a request, and the model could not answer.
        self.hears_last_turn = user is None

    async def start(self) -> Episode:
        return self

    async def reply(self, message: Message) -> Reply:
        if self._user is None:
            return Reply(done=True)
        self._spoken.append(message)
        said = await self._user(self._spoken, self._task, self._usage)
        if said is None:
            return Reply(done=True)
        self._spoken.append({"role": "user", "content": said})
        return Reply(messages=[self._spoken[-1]])

    async def score(self, trajectory: Trajectory) -> Score:
        if self._scorer is None:
            return None
        # A function that is not async runs on a thread, because it may block on a judge or on computation.
        if inspect.iscoroutinefunction(self._scorer):
            found: Score = await self._scorer(trajectory, self._task)
        else:
            found = await asyncio.to_thread(self._scorer, trajectory, self._task)
        return found


def offered_tools(openings: Sequence[Opening], given: Managers) -> list[ToolManager]:
    """Return the tools that each conversation offers. If a conversation has its own schemas, those schemas are offered,
    and the manager's tools of the same names execute the calls. Otherwise the manager's tools are offered.

    A schema for which the manager has no tool is offered too, because it belongs to the conversation. Calls to it are
    answered with an error.
    """
    managers = [given] * len(openings) if given is None or isinstance(given, ToolManager) else list(given)
    if len(managers) != len(openings):
        raise UsageError(
            f"tool_manager holds {len(managers)} tool managers for {len(openings)} trajectories; give one "
            "for each, or a single one for all"
        )
    pairs = list(zip(openings, managers, strict=True))
    idle = sum(bool(opening.tools) and manager is None for opening, manager in pairs)
    if idle:
        logger.warning(
            "%d of %d conversations have tool schemas but no tool manager, so calls are answered with an error; pass "
            "tool_manager=ToolManager([...])",
            idle,
            len(openings),
        )
    found = []
    for opening, manager in pairs:
        runs = ToolManager() if manager is None else manager
        found.append(ToolManager(_Shown(schema, runs) for schema in opening.tools) if opening.tools else runs)
    return found


class _Shown:
    """A tool with the conversation's schema and the function of the manager's tool."""

    def __init__(self, schema: Mapping[str, Any], manager: ToolManager) -> None:
        self.name: str = schema["function"]["name"]
        self.schema = schema
        self._tool: Tool | None = manager.get(self.name)

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        if self._tool is None:
            raise ToolArgumentsError("it is described, but nothing runs it here. Answer without it.")
        return await self._tool(arguments)
