"""Runs one turn: checks the limits, compares the history with the history of the last turn, and records the answer.
Subclasses produce the answer."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import EnvironmentFault, VerbatimError
from verbatim.core.token_tree import Ids
from verbatim.core.types import (
    Experts,
    Float32,
    Int32,
    KeptSets,
    Message,
    ParseStatus,
    StopReason,
    ToolCall,
    TurnTiming,
)
from verbatim.environments.tools.tool import Tool
from verbatim.models.renderers.conversation import BreakReason, Conversation
from verbatim.rollouts.copies import Others, begins_with, copied, others_in, schema_and_text
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.turn_arguments import checked_name, checked_state_key, checked_trained

JUDGE_USAGE = "judge_usage"
"""Key of `Trajectory.info` under which a judge's usage for the episode is stored (requests, tokens, cost)."""
RENDERED_AGAIN = "rendered_again"
"""Key of `Trajectory.info`. Its value is a list of the turns whose prompts were rendered from scratch and do not extend
the turn before them. An entry has the turn's index as "turn", the index of the turn before it as "after", and a
`BreakReason` as "reason"."""
TOOLS_OFFERED = "tools_offered"
"""Key of `Trajectory.info` whose value is True if the model was shown tools in any turn."""


def rendered_again(info: Mapping[str, Any]) -> list[tuple[int, BreakReason]]:
    """Read the turns and their break reasons from `info[RENDERED_AGAIN]`. Entries that do not have the expected form
    are skipped, because the environment may use the same key in `info`."""
    noted = info.get(RENDERED_AGAIN)
    return [
        (one["turn"], reason)
        for one in (noted if isinstance(noted, list) else ())
        if isinstance(one, Mapping) and isinstance(one.get("turn"), int)
        for reason in BreakReason
        if reason == one.get("reason")
    ]


class EpisodeOver(VerbatimError):
    """Raised when the trajectory cannot continue: no turns or tokens are left, or the engine stopped."""

    def __init__(self, stop_reason: StopReason, message: Message | None = None) -> None:
        super().__init__(str(stop_reason))
        self.stop_reason = stop_reason
        self.message = message
        """The message sampled up to the cut, or None if nothing was sampled."""


@dataclass(kw_only=True, eq=False, slots=True)
class SampledAnswer:
    """An engine's answer to one prompt. Only `free_arrays` modifies an answer."""

    message: Message
    """The assistant's message."""
    tool_calls: tuple[ToolCall, ...]
    """Every attempted tool call with its parse status. Each call has an id."""
    stop_reason: StopReason
    """The reason why the completion ended."""
    prompt_ids: Ids | None = None
    """The prompt's ids, or None if the engine returned text only."""
    completion_ids: Ids | None = None
    """The sampled ids, or None if the engine returned text only."""
    extends: int | None = None
    """Index of the turn that the prompt extends, or None if the prompt was not bridged."""
    conversation: Conversation | None = None
    """The renderer's object for the prompt and the answer, from which the next bridge is built; None if the engine
    returned text only."""
    logprobs: Float32 | Sequence[float] | None = None
    """One logprob for each id of `completion_ids`, or None if they are missing."""
    policy_versions: Int32 | Sequence[int] | None = None
    """One policy version for each id of `completion_ids`, or None if they are unknown."""
    routed_experts: Experts | None = None
    """The routed experts in the format of `Turn.routed_experts`, or None if they were not recorded."""
    kept_sets: KeptSets | None = None
    """One kept set for each id of `completion_ids`, or None if top-p, top-k and min-p are off."""
    temperature: float = 1.0
    timing: TurnTiming = field(default_factory=TurnTiming)

    def free_arrays(self) -> None:
        """Free the arrays, to save memory in long episodes. Call this method when the turn has been recorded and the
        next prompt has been built."""
        self.prompt_ids = self.completion_ids = self.logprobs = self.policy_versions = self.routed_experts = None
        self.conversation = self.kept_sets = None

    def turn_fields(self, prompt: Prompt, state_key: str | None) -> dict[str, Any]:
        """Return the fields of the `Turn` other than its ids. The ids are left out, because `TeacherLoop` records the
        same turn with the ids of a student."""
        parse_status: ParseStatus = "ok"
        for call in self.tool_calls:
            if call.status != "ok":
                parse_status = call.status
                break
        return {
            "stop_reason": self.stop_reason,
            "state_key": state_key,
            "agent": prompt.agent,
            "tool_calls": self.tool_calls,
            "parse_status": parse_status,
            "timing": self.timing,
            "trained": prompt.trained,
        }


@dataclass(kw_only=True, eq=False, slots=True)
class Thread:
    """One agent's conversation up to and including its last turn. Treat it as immutable. It is not a frozen dataclass
    because every turn creates a `Thread`, and creating a frozen dataclass takes three times as long."""

    turn: int
    """The index of the last turn."""
    messages: tuple[Message, ...]
    """The agent's prompt messages and answers. They are copies, because the caller may modify the originals."""
    tools: tuple[str, ...]
    """The schemas, as text, of the tools that the agent was shown."""
    answer: SampledAnswer
    """The answer of the last turn."""
    others: Others | None = None
    """The messages that hold more than text (see `copies.Others`), or None if it is unknown which messages do."""


@dataclass(kw_only=True, eq=False, slots=True)
class Prompt:
    """An agent's next prompt, before rendering. Treat it as immutable, like `Thread`."""

    agent: str
    messages: tuple[Message, ...]
    """A copy of the conversation."""
    schemas: Sequence[Mapping[str, Any]]
    """Schemas of the tools that the agent is shown."""
    tools: tuple[str, ...]
    """The same schemas as text."""
    thread: Thread | None
    """The agent's conversation so far, or None in its first turn."""
    num_known: int
    """Number of messages at the start of `messages` that are the messages of `thread`; 0 if the history was edited."""
    trained: bool = True
    """False if the answer is to be context only."""
    others: Others | None = None
    """The messages that hold more than text (see `copies.Others`), or None if it is unknown which messages do."""


class EpisodeLoop(abc.ABC):
    """Samples the turns of one episode for all of its agents; implements `environments.environment.Agent`.

    A subclass implements `_answer`, which answers a prompt. Everything else about a turn is in this class.
    """

    engine = "sampler"
    """Prefix of the trajectory's `error` when the engine failed."""
    needs_content = True
    """True if every message must have "content". Renderers need it; chat servers accept tool calls without it."""

    def __init__(self, *, limits: EpisodeLimits, recorder: Recorder) -> None:
        self.limits = limits
        self.recorder = recorder
        self._threads: dict[str, Thread] = {}
        self._num_calls = 0
        self._num_started = 0
        self._num_completion_tokens = 0
        """Number of tokens in the answers so far."""
        self._num_promised_tokens = 0
        """Sum of `max_tokens` over the requests in flight. These tokens are reserved when a request starts, so that
        concurrent agents cannot exceed the episode's budget together."""
        self.stop_reason: StopReason | None = None
        """The reason why the episode ended, or None if it has not ended. Once it is set, every request is refused."""
        self.in_order = False
        """True if the turns are sequential and none follows a failed turn. Then the arrays of a turn are freed as soon
        as the next prompt is built."""
        self.offers_tools = False
        """True if the model was shown tools in any turn."""
        self.no_room: tuple[int, int] | None = None
        """The length of the last prompt that left no room for a completion, and the length of the context, both in
        tokens; None if every prompt left room."""
        self.last_answer: SampledAnswer | None = None
        """The answer to the last prompt, even if it could not be recorded; None until the answer arrives."""

    @property
    def turns_left(self) -> int:
        """Number of turns that may still be started. Turns in flight count as started."""
        return self.limits.max_turns - self._num_started

    @property
    def tokens_left(self) -> int | None:
        """Number of tokens that may still be sampled, after `max_tokens` are reserved for each request in flight; None
        if there is no limit."""
        most = self.limits.max_total_completion_tokens
        return None if most is None else most - self._num_completion_tokens - self._num_promised_tokens

    @property
    def num_unrecorded_turns(self) -> int:
        """Number of answers that could not be recorded as turns because their ids are unknown."""
        return 0

    @property
    def info(self) -> Mapping[str, Any]:
        """The engine's entries for the trajectory's `info`."""
        return {}

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        agent: str = "main",
        state_key: str | None = None,
        *,
        trained: bool = True,
    ) -> Message:
        """Sample and record one turn of the named agent, and return the assistant's message.

        With `trained=False` the turn is context only, and its tokens are counted as `untrained`.

        Raises:
            EpisodeOver: no turns or tokens are left, or this completion was cut off (it is recorded anyway).
            EnvironmentFault: the messages, tools, agent name or state key are invalid.
            RecordError: the engine's answer cannot be recorded, or the episode has ended.
            SamplerFault: the engine failed, and retries did not help.
        """
        self.last_answer = None
        self._refuse_if_over()
        agent, state_key = checked_name(agent), checked_state_key(state_key, "state_key =")
        schemas = [dict(tool.schema) for tool in tools]
        prompt = self._prompt(messages, schemas, agent, trained=checked_trained(trained))
        self.offers_tools |= bool(prompt.schemas)
        answer = self.last_answer = await self._answer(prompt)
        turn = self._record(answer, prompt, state_key)
        said = copied(answer.message)
        others = None if prompt.others is None else (*prompt.others, *others_in([said], len(prompt.messages)))
        self._threads[agent] = Thread(
            turn=turn, messages=(*prompt.messages, said), tools=prompt.tools, answer=answer, others=others
        )
        if answer.stop_reason is not StopReason.STOP:
            self.stop_reason = answer.stop_reason
            raise EpisodeOver(answer.stop_reason, answer.message)
        return answer.message

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that have taken a turn, in the order of their first turns."""
        return tuple(self._threads)

    def messages(self, agent: str = "main") -> tuple[Message, ...]:
        """Return the agent's prompt messages and answers, up to and including its last turn."""
        thread = self._threads.get(agent)
        return thread.messages if thread is not None else ()

    def amend_last_turn(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus = "ok") -> None:
        """Add to the last turn what was not yet known when it was recorded: its reward, the seconds that its tools
        took, and whether its calls matched a tool's schema."""
        if not self.recorder.turns:
            return
        turn = self.recorder.turns[-1]
        timing = turn.timing or TurnTiming()
        self.recorder.amend(
            len(self.recorder.turns) - 1,
            reward=reward,
            timing=TurnTiming(queued=timing.queued, generated=timing.generated, tools=tool_seconds),
            parse_status=turn.parse_status if turn.parse_status != "ok" else parse_status,
        )

    def why_nothing_sampled(self, ended: StopReason) -> str | None:
        """Explain why the policy sampled no token in this episode; return None if it did sample.

        Turns with `trained=False` (the turns of an opponent or a user) are not the policy's turns. Turns that are
        sampled greedily are the policy's turns, although the gateway never trains them.
        """
        turns = [turn for turn in self.recorder.turns if len(turn.completion_ids)]
        if self.num_unrecorded_turns or self.recorder.num_unrecorded_tokens:
            return None
        if any(turn.trained or turn.temperature == 0 for turn in turns):
            return None
        if self.no_room is not None:
            prompt, context = self.no_room
            return (
                f"the policy sampled nothing, because its prompt of {prompt} tokens leaves no room in a context of "
                f"{context} (orchestrator.seq_len); raise that, or shorten the prompt"
            )
        if turns:
            return (
                "the policy sampled nothing of its own, because every turn was sampled with trained=False; leave "
                "that out for the agent that you train"
            )
        return f"the policy sampled nothing before the episode ended ({ended}), so its reward is not the policy's"

    def finish(self) -> None:  # noqa: B027  most engines record each turn at once
        """Record the turns that are still held back. Called at the end of the conversation. May raise a RecordError."""

    async def end(self) -> bool:
        """End the episode: cancel the requests in flight and count their tokens. Returns True if there were any
        requests in flight."""
        return False

    @abc.abstractmethod
    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        """Answer a prompt. Implementations call `_begin_turn` only when all checks have passed and only the engine can
        still fail, because a refused prompt does not count as a turn."""

    def _record(self, answer: SampledAnswer, prompt: Prompt, state_key: str | None) -> int:
        """Record the turn, and return its index."""
        assert answer.prompt_ids is not None and answer.completion_ids is not None
        return self.recorder.record(
            prompt_ids=answer.prompt_ids,
            completion_ids=answer.completion_ids,
            extends=answer.extends,
            logprobs=answer.logprobs,
            policy_versions=answer.policy_versions,
            temperature=answer.temperature,
            routed_experts=answer.routed_experts,
            kept_sets=answer.kept_sets,
            **answer.turn_fields(prompt, state_key),
        )

    def _refuse_if_over(self) -> None:
        if self.stop_reason is not None:
            raise EpisodeOver(self.stop_reason)
        self.recorder.refuse_if_closed()
        if self.turns_left <= 0:
            self._end(StopReason.MAX_TURNS)
        self._within_budget(0)

    def _end(self, reason: StopReason) -> None:
        self.stop_reason = reason
        raise EpisodeOver(reason)

    def _within_budget(self, max_tokens: int) -> int:
        """Return `max_tokens`, reduced to the number of tokens that the episode has left.

        Raises:
            EpisodeOver: no tokens are left.
        """
        left = self.tokens_left
        if left is not None and left <= 0:
            self._end(StopReason.LENGTH)
        return max_tokens if left is None else min(max_tokens, left)

    def _begin_turn(self) -> int:
        """Count a turn as started, and return its number, counting from 0."""
        self._num_started += 1
        return self._num_started - 1

    def _identify(self, call: ToolCall) -> ToolCall:
        self._num_calls += 1
        return (
            call
            if call.id
            else ToolCall(
                name=call.name,
                arguments=call.arguments,
                status=call.status,
                raw=call.raw,
                id=f"call_{self._num_calls - 1}",
            )
        )

    def _prompt(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], agent: str, *, trained: bool
    ) -> Prompt:
        """Build the agent's next prompt. A message that equals a message of the agent's last turn is not copied again:
        the copy in the agent's thread is used. So each message is copied once per episode and not once per turn."""
        thread = self._threads.get(agent)
        known, others = (thread.messages, thread.others) if thread is not None else ((), ())
        if not begins_with(messages, known, others):
            known, others = (), ()
        new = [copied(message) for message in messages[len(known) :]]
        if not (known or new):
            raise EnvironmentFault(
                f"there are no messages for the agent {agent!r} to answer; expected at least one, "
                'such as {"role": "user", "content": "hi"}'
            )
        shown = [schema_and_text(schema) for schema in schemas]
        return Prompt(
            agent=agent,
            messages=(*known, *new),
            schemas=[schema for schema, _ in shown],
            tools=tuple(text for _, text in shown),
            thread=thread,
            num_known=len(known),
            trained=trained,
            others=None if others is None else (*others, *others_in(new, len(known))),
        )
