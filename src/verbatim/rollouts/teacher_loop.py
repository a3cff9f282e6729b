"""Episodes in which a teacher acts, behind a chat-completions server, recorded in the student's ids."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.errors import ModelError, RecordError, UsageError
from verbatim.inference.base import SamplingParams
from verbatim.inference.chat.client import Connection
from verbatim.inference.chat.request import chat_body
from verbatim.renderers.base import ParsedResponse, Renderer
from verbatim.rollouts.agent_loop import EpisodeLimits, EpisodeOver, same_messages
from verbatim.rollouts.demonstrations import trajectory_from_messages
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.tools.base import Tool
from verbatim.types import Message, ParseStatus, StopReason, ToolCall, Turn, TurnTiming


@dataclass(kw_only=True, eq=False)
class _Thread:
    """One agent's conversation."""

    messages: list[Message]
    """Everything it was given and has said."""
    schemas: list[Mapping[str, Any]]
    """The tools it was shown."""
    said: list[int]
    """The numbers of its turns, in order."""


@dataclass(kw_only=True, eq=False)
class _Said:
    """What one turn was, until its ids are known."""

    agent: str
    tool_calls: tuple[ToolCall, ...]
    stop_reason: StopReason
    state_key: str | None
    reward: float | None = None
    parse_status: ParseStatus = "ok"
    timing: TurnTiming = field(default_factory=TurnTiming)


class TeacherLoop:
    """Has the interface of `AgentLoop`, and a teacher that speaks text.

    A student imitates texts: their ids are those of its own renderer, made when the episode is over, because a
    template may write an answer differently once something follows it. Nothing is known of the teacher's logprobs.
    """

    def __init__(
        self,
        *,
        connection: Connection,
        renderer: Renderer,
        params: SamplingParams,
        limits: EpisodeLimits,
        recorder: Recorder,
        seed: int,
    ) -> None:
        self._connection = connection
        self._renderer = renderer
        # The end of a turn is the teacher's own, in its own ids.
        self._params = dataclasses.replace(params, stop_token_ids=())
        self._limits = limits
        self._recorder = recorder
        self._seed = seed
        self._threads: dict[str, _Thread] = {}
        self._said: list[_Said] = []
        self._num_calls = 0
        self._num_started = 0
        self.request_errors: Counter[str] = Counter()
        """What went wrong with requests that were made again."""
        self.stop_reason: StopReason | None = None
        """Set once a limit was reached: nothing more is asked for."""
        self.offers_tools = False
        """Whether any turn was shown tools."""

    @property
    def last_turn(self) -> _Said:
        """The turn that was said last."""
        return self._said[-1]

    @property
    def turns_left(self) -> int:
        """Turns that may still be started."""
        return self._limits.max_turns - self._num_started

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        agent: str = "main",
        state_key: str | None = None,
    ) -> Message:
        """The teacher's next message, well-formed tool calls in it.

        Raises:
            EpisodeOver: no turn is left, or this message was cut off.
            SamplerFault: the server failed for good.
            RecordError: the agent's earlier conversation is not what it was.
        """
        self._recorder.refuse_if_closed()
        if self.stop_reason is not None:
            raise EpisodeOver(self.stop_reason)
        if self.turns_left <= 0:
            self.stop_reason = StopReason.MAX_TURNS
            raise EpisodeOver(self.stop_reason)
        number, self._num_started = self._num_started, self._num_started + 1
        schemas: list[Mapping[str, Any]] = [copy.deepcopy(dict(tool.schema)) for tool in tools]
        self.offers_tools |= bool(schemas)
        thread = self._thread(agent, messages, schemas)
        messages = copy.deepcopy(list(messages))  # those who gave them may change theirs
        body = chat_body(
            self._connection.api.model, messages, schemas, self._params, extra_body={},
            seed=derive_seed(self._seed, number) % 2**31,
        )  # fmt: skip
        answer = await self._connection.complete(body, self.request_errors)
        calls = tuple(self._identify(call) for call in answer.tool_calls)
        message = ParsedResponse(
            content=answer.content, reasoning_content=answer.reasoning, tool_calls=calls
        ).message()
        thread.messages = [*messages, copy.deepcopy(message)]
        thread.said.append(len(self._said))
        self._said.append(
            _Said(
                agent=agent, tool_calls=calls, stop_reason=answer.stop_reason, state_key=state_key,
                parse_status=next((call.status for call in calls if call.status != "ok"), "ok"),
            )
        )  # fmt: skip
        if answer.stop_reason is not StopReason.STOP:
            self.stop_reason = answer.stop_reason
            raise EpisodeOver(answer.stop_reason, message)
        return message

    def messages(self, agent: str = "main") -> tuple[Message, ...]:
        """Everything the agent has been given and has said, up to its last turn."""
        thread = self._threads.get(agent)
        return tuple(thread.messages) if thread is not None else ()

    def amend_last_turn(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus = "ok") -> None:
        """Add what became known after the message."""
        said = self._said[-1]
        said.reward, said.timing = reward, TurnTiming(tools=tool_seconds)
        said.parse_status = said.parse_status if said.parse_status != "ok" else parse_status

    def finish(self) -> None:
        """Record every turn in the student's ids, in the order in which they were said.

        Raises:
            RecordError: the student's template cannot write what was said.
        """
        turns: dict[int, Turn] = {}
        for agent, thread in self._threads.items():
            try:
                written = trajectory_from_messages(self._renderer, thread.messages, thread.schemas or None).turns
            except ModelError:
                raise
            except UsageError as error:
                raise RecordError(f"agent {agent}: {error}") from error
            turns.update(zip(thread.said, written[-len(thread.said) :], strict=True))
        for number in sorted(turns):
            turn, said = turns[number], self._said[number]
            self._recorder.count(len(turn.completion_ids))
            self._recorder.record(
                prompt_ids=turn.prompt_ids, completion_ids=turn.completion_ids, agent=said.agent,
                tool_calls=said.tool_calls, stop_reason=said.stop_reason, state_key=said.state_key,
                parse_status=said.parse_status, reward=said.reward, timing=said.timing,
            )  # fmt: skip

    async def end(self) -> bool:
        """The episode is over. What a teacher says later is never written in the student's ids: nothing to count."""
        return False

    def _thread(self, agent: str, messages: Sequence[Message], schemas: list[Mapping[str, Any]]) -> _Thread:
        thread = self._threads.setdefault(agent, _Thread(messages=[], schemas=schemas, said=[]))
        known = thread.messages
        if not same_messages(messages[: len(known)], known) or (thread.said and thread.schemas != schemas):
            raise RecordError(
                f"agent {agent}: its conversation or its tools are not what they were in turn {thread.said[-1]}; what "
                "a teacher said is imitated in one conversation, so give another history another agent name"
            )
        return thread

    def _identify(self, call: ToolCall) -> ToolCall:
        self._num_calls += 1
        return call if call.id else dataclasses.replace(call, id=f"call_{self._num_calls - 1}")
