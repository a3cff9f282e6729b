"""Runs one turn: limits, history, tool calls, record. Subclasses produce the answer."""

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
"""The key of `Trajectory.info` for what a judge spent on the episode: requests, tokens, cost."""
RENDERED_ANEW = "rendered_anew"
"""The key of `Trajectory.info` for the turns whose prompts do not continue a turn as it was sampled: for each its index
as "turn", the index of that turn as "after", and a `BreakReason` as "reason"."""
TOOLS_OFFERED = "tools_offered"
"""The key of `Trajectory.info` that says that the model was shown tools in some turn."""


def rendered_anew(info: Mapping[str, Any]) -> list[tuple[int, BreakReason]]:
    """The turns that a trajectory's `info` notes under `RENDERED_ANEW`, and why. `info` is the environment's: what else
    stands there under this name is left out."""
    noted = info.get(RENDERED_ANEW)
    return [
        (one["turn"], reason)
        for one in (noted if isinstance(noted, list) else ())
        if isinstance(one, Mapping) and isinstance(one.get("turn"), int)
        for reason in BreakReason
        if reason == one.get("reason")
    ]


class EpisodeOver(VerbatimError):
    """The trajectory cannot go on: no turns or tokens are left, or the engine stopped."""

    def __init__(self, stop_reason: StopReason, message: Message | None = None) -> None:
        super().__init__(str(stop_reason))
        self.stop_reason = stop_reason
        self.message = message
        """What was said before it was cut off; None if nothing was sampled."""


@dataclass(kw_only=True, eq=False, slots=True)
class SampledAnswer:
    """What an engine makes of one prompt. Only `free_arrays` changes it."""

    message: Message
    """The assistant's message."""
    tool_calls: tuple[ToolCall, ...]
    """Every attempted call with its parse status; each has an id."""
    stop_reason: StopReason
    """Why the completion ended."""
    prompt_ids: Ids | None = None
    """The ids that were sent; None where the engine speaks text."""
    completion_ids: Ids | None = None
    """The ids that were sampled; None where the engine speaks text."""
    extends: int | None = None
    """The index of the turn that the prompt extends by a bridge."""
    conversation: Conversation | None = None
    """The prompt and the answer as the renderer continues them; None where the engine speaks text."""
    logprobs: Float32 | Sequence[float] | None = None
    """One for each of `completion_ids`; None: missing."""
    policy_versions: Int32 | Sequence[int] | None = None
    """One for each of `completion_ids`; None: unknown."""
    routed_experts: Experts | None = None
    """As a `Turn` has them; None: not recorded."""
    kept_sets: KeptSets | None = None
    """One for each of `completion_ids`; None: nothing was cut."""
    temperature: float = 1.0
    timing: TurnTiming = field(default_factory=TurnTiming)

    def free_arrays(self) -> None:
        """Free the arrays: the turn is recorded, and the prompt that continues it is made."""
        self.prompt_ids = self.completion_ids = self.logprobs = self.policy_versions = self.routed_experts = None
        self.conversation = self.kept_sets = None

    def turn_fields(self, prompt: Prompt, state_key: str | None) -> dict[str, Any]:
        """The fields of the `Turn` that do not depend on whose ids it is recorded in."""
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
    """Where one agent's conversation stands after its last turn. Never changed: not frozen, because every turn makes
    one, and that takes three times as long."""

    turn: int
    """The index of that turn."""
    messages: tuple[Message, ...]
    """Everything the agent has been given and has said: copies, because their owner may change the originals."""
    tools: tuple[str, ...]
    """The schemas it was shown, as text."""
    answer: SampledAnswer
    """What the engine made of its last prompt."""
    others: Others | None = None
    """Which of the messages hold more than text; None: not known."""


@dataclass(kw_only=True, eq=False, slots=True)
class Prompt:
    """What an agent is to answer. Never changed, as a `Thread`."""

    agent: str
    messages: tuple[Message, ...]
    """The conversation, copied."""
    schemas: Sequence[Mapping[str, Any]]
    """The tools it is shown."""
    tools: tuple[str, ...]
    """The same as text."""
    thread: Thread | None
    """The agent's conversation so far; None in its first turn."""
    num_known: int
    """How many of `messages` the thread holds already; 0 where it holds another history."""
    trained: bool = True
    """Whether the answer may be trained."""
    others: Others | None = None
    """Which of the messages hold more than text; None: not known."""


class EpisodeLoop(abc.ABC):
    """Takes the turns of one episode, whichever agent speaks; implements `environments.environment.Agent`.

    A subclass says how a prompt becomes an answer. Everything else about a turn is here.
    """

    engine = "sampler"
    """What a trajectory's error calls the engine that failed."""
    needs_content = True
    """Whether every message needs "content": renderers need it; chat servers also take calls without text."""

    def __init__(self, *, limits: EpisodeLimits, recorder: Recorder) -> None:
        self.limits = limits
        self.recorder = recorder
        self._threads: dict[str, Thread] = {}
        self._num_calls = 0
        self._num_started = 0
        self._num_completion_tokens = 0
        """Of the answers so far."""
        self._num_promised_tokens = 0
        """The most that answers under way may have."""
        self.stop_reason: StopReason | None = None
        """Set once a limit was reached: nothing more is sampled."""
        self.in_order = False
        """Whether one turn is taken after the other, and none after one that failed: then a turn's arrays are freed as
        soon as the next prompt is made."""
        self.offers_tools = False
        """Whether any turn was shown tools."""
        self.no_room: tuple[int, int] | None = None
        """Tokens of the last prompt that left no room, and of the context; None: all prompts had room."""
        self.last_answer: SampledAnswer | None = None
        """The answer to the last prompt, also where it could not be recorded; None while there is no answer to it."""

    @property
    def turns_left(self) -> int:
        """Turns that may still be started, those under way elsewhere counted in."""
        return self.limits.max_turns - self._num_started

    @property
    def tokens_left(self) -> int | None:
        """Sampled tokens that turns may still have; what turns under way may take is counted in. None: no limit."""
        most = self.limits.max_total_completion_tokens
        return None if most is None else most - self._num_completion_tokens - self._num_promised_tokens

    @property
    def num_unrecorded_turns(self) -> int:
        """Answers that are in no recorded turn, because their ids are unknown."""
        return 0

    @property
    def info(self) -> Mapping[str, Any]:
        """What the engine adds to the trajectory's `info`."""
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
        """Record one turn of the named agent and return the assistant's message.

        With `trained=False` the turn is context only; its tokens are counted as `untrained`.

        Raises:
            EpisodeOver: no turn or token is left, or this completion was cut off (it is recorded).
            EnvironmentFault: messages, tools, name or state that cannot be kept.
            RecordError: the engine returned what cannot be recorded, or the episode has ended.
            SamplerFault: the engine failed for good.
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
        """The agents that have spoken, in the order of their first turns."""
        return tuple(self._threads)

    def messages(self, agent: str = "main") -> tuple[Message, ...]:
        """Everything the agent has been given and has said, up to its last turn."""
        thread = self._threads.get(agent)
        return thread.messages if thread is not None else ()

    def amend_last_turn(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus = "ok") -> None:
        """Add what became known after the completion: its reward, the seconds of its tools, and whether its readable
        calls fitted a tool."""
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
        """Why the policy has sampled no token of its own until the episode ended; None where it has.

        Turns with `trained=False` (an opponent, a user) are not its own. Greedy ones are, though the gateway never
        trains them.
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
                "that out for the agent that is to learn"
            )
        return f"the policy sampled nothing before the episode ended ({ended}), so what it earned is not the policy's"

    def finish(self) -> None:  # noqa: B027  most engines record each turn at once
        """The conversation is over: record what is not recorded yet; a RecordError if that cannot be."""

    async def end(self) -> bool:
        """End the episode: cut off what is still being sampled, and count it. Returns whether anything was."""
        return False

    @abc.abstractmethod
    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        """What the engine makes of a prompt. Calls `_begin_turn` once nothing but the engine can fail."""

    def _record(self, answer: SampledAnswer, prompt: Prompt, state_key: str | None) -> int:
        """Write the turn down; its index."""
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
        """So many tokens of a turn, or what is left of the episode's.

        Raises:
            EpisodeOver: none is left.
        """
        left = self.tokens_left
        if left is not None and left <= 0:
            self._end(StopReason.LENGTH)
        return max_tokens if left is None else min(max_tokens, left)

    def _begin_turn(self) -> int:
        """Count a turn that is started; its number."""
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
        """The messages as they are now; those of the agent's last turn are compared with it, and copied only once."""
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
