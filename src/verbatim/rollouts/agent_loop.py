"""One turn, written once: messages to ids, ids to a completion, a completion to a message, all of it recorded."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.errors import EnvironmentFault, VerbatimError
from verbatim.inference.base import Completion, Sampler, SampleRequest, SamplingParams
from verbatim.renderers.base import ParsedResponse, Renderer
from verbatim.rollouts.draws import Draws
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.texts import error_text
from verbatim.tools.base import Tool
from verbatim.types import Int32, Message, ParseStatus, StopReason, ToolCall, Turn, TurnTiming


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Where an episode is cut off, and what is done about misbehaviour."""

    max_turns: int = 16
    """Most turns, sub-agents' included."""
    max_context: int = 2048
    """Most tokens of a prompt and its completion together."""
    timeout: float = 600.0
    """Seconds for the whole episode."""
    tool_timeout: float = 60.0
    """Seconds for one tool call."""
    tool_output_limit: int = 16_384
    """Characters of one tool answer."""
    tool_error: Literal["message", "stop"] = "message"
    """Whether a tool that fails or hangs is told to the model, or ends the episode as failed."""
    max_malformed_retries: int = 2
    """Turns in a row that may hold nothing but unreadable calls; one more ends the episode as "malformed"."""


_LONG_MESSAGES, _LONG_CHARACTERS = 128, 50_000
"""A chat template takes about 5 ms to render more, which is how long Python lets one thread run while others wait."""

TOOLS_OFFERED = "tools_offered"
"""The key of `Trajectory.info` that says that the model was shown tools in some turn."""


class EpisodeOver(VerbatimError):
    """The trajectory cannot go on: no turns or tokens are left, or the engine stopped."""

    def __init__(self, stop_reason: StopReason, message: Message | None = None) -> None:
        super().__init__(str(stop_reason))
        self.stop_reason = stop_reason
        self.message = message
        """What was said before it was cut off; None if nothing was sampled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Thread:
    """Where one agent's conversation stands."""

    turn: int
    """The index of its last turn."""
    messages: tuple[Message, ...]
    """Everything it has been given and has said: copies, because those who gave them may change theirs."""
    prompt_ids: Int32
    completion_ids: Int32
    tools: tuple[str, ...]
    """The schemas it was shown, as text."""


class AgentLoop:
    """Samples turns for one episode, whichever agent speaks; implements `environments.base.Agent`.

    Each agent's next prompt is its previous prompt and completion verbatim plus what is new, wherever the
    renderer finds that right (a bridge). Otherwise the conversation is rendered anew, which the strategy will see
    as a break. That a bridge extends the ids exactly is verified by the recorder, never trusted.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        params: SamplingParams,
        limits: EpisodeLimits,
        recorder: Recorder,
        seed: int,
        session: str | None = None,
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        ends = [token for token in renderer.stop_token_ids if token < sampler.vocab_size]  # a tokenizer may have more
        self._params = dataclasses.replace(
            params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
        )
        self._limits = limits
        self._recorder = recorder
        self._seed = seed
        self._session = str(seed) if session is None else session
        self._draws = Draws(recorder)
        self._threads: dict[str, _Thread] = {}
        self._told: tuple[Message, ...] = ()
        self._num_calls = 0
        self._num_started = 0
        self._num_turns_of: dict[str, int] = {}
        self.stop_reason: StopReason | None = None
        """Set once a limit was reached: nothing more is sampled."""
        self.offers_tools = False
        """Whether any turn was shown tools."""

    @property
    def sampler(self) -> Sampler:
        """Who speaks."""
        return self._sampler

    @property
    def renderer(self) -> Renderer:
        """How it speaks."""
        return self._renderer

    @property
    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self._params

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Everything that was recorded, in order."""
        return tuple(self._recorder.turns)

    @property
    def last_turn(self) -> Turn:
        """The turn that was recorded last."""
        return self._recorder.turns[-1]

    @property
    def turns_left(self) -> int:
        """Turns that may still be started, those under way elsewhere counted in."""
        return self._limits.max_turns - self._num_started

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        agent: str = "main",
        state_key: str | None = None,
    ) -> Message:
        """Record one turn of the named agent and return the assistant's message, well-formed tool calls in it.

        Raises:
            EpisodeOver: no turn or token is left, or this completion was cut off (it is recorded).
            RecordError: the sampler returned what cannot be, or the episode has ended.
            SamplerFault: the engine failed for good.
        """
        self._refuse_if_over()
        schemas = [dict(tool.schema) for tool in tools]
        self.offers_tools |= bool(schemas)
        names = tuple(map(str, schemas))
        given = self._copied(messages, agent)
        prompt_ids, extends = await self._rendered(given, schemas, names, agent)
        index, completion, parsed = await self._take_turn(
            prompt_ids, self._params, schemas, extends=extends, agent=agent, state_key=state_key
        )
        message = parsed.message()
        self._threads[agent] = _Thread(
            turn=index,
            messages=(*given, copy.deepcopy(message)),
            prompt_ids=prompt_ids,
            completion_ids=completion.ids,
            tools=names,
        )
        if completion.stop_reason is not StopReason.STOP:
            self.stop_reason = completion.stop_reason
            raise EpisodeOver(completion.stop_reason, message)
        return message

    async def complete(
        self, prompt_ids: Int32, params: SamplingParams, agent: str = "main", *, trained: bool = True
    ) -> Completion:
        """Record one turn of exact ids, for an environment that renders by itself, and return the completion.

        One that was cut off is returned too. With `trained=False` its logprobs are not recorded: it is context only.

        Raises:
            EpisodeOver: no turn or token is left.
            RecordError: the sampler returned what cannot be, or the episode has ended.
            SamplerFault: the engine failed for good.
        """
        self._refuse_if_over()
        _, completion, _ = await self._take_turn(prompt_ids, params, [], agent=agent, trained=trained)
        return completion

    def tell(self, messages: Sequence[Message]) -> None:
        """What was said in the turns of `complete`, for people: nothing else knows their messages."""
        self._told = tuple(messages)

    def messages(self, agent: str = "main") -> tuple[Message, ...]:
        """Everything the agent has been given and has said, up to its last turn."""
        thread = self._threads.get(agent)
        return thread.messages if thread is not None else self._told

    def amend_last_turn(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus = "ok") -> None:
        """Add what became known after the completion: what the answer was worth and took, and whether the calls
        that could be read also fitted a tool."""
        turn = self.last_turn
        self._recorder.amend(
            len(self._recorder.turns) - 1,
            reward=reward,
            timing=dataclasses.replace(turn.timing or TurnTiming(), tools=tool_seconds),
            parse_status=turn.parse_status if turn.parse_status != "ok" else parse_status,
        )

    def finish(self) -> None:
        """The conversation is over; every turn is recorded already."""

    async def end(self) -> bool:
        """The episode is over: what is still being sampled is cut off, and counted. Whether anything was."""
        return await self._draws.end()

    def _refuse_if_over(self) -> None:
        if self.stop_reason is not None:
            raise EpisodeOver(self.stop_reason)
        if self._draws.over:
            raise self._recorder.went_on()
        self._recorder.refuse_if_closed()
        if self.turns_left <= 0:
            self._end(StopReason.MAX_TURNS)

    async def _take_turn(
        self, prompt_ids: Int32, params: SamplingParams, schemas: Sequence[Mapping[str, Any]], *, agent: str,
        extends: int | None = None, state_key: str | None = None, trained: bool = True,
    ) -> tuple[int, Completion, ParsedResponse]:  # fmt: skip
        """Sample and record one turn; its index, what was sampled, and what it says."""
        room = min(self._limits.max_context, self._sampler.context_length) - len(prompt_ids)
        if room <= 0:
            self._end(StopReason.LENGTH)
        self._num_started += 1
        number = self._num_turns_of.get(agent, 0)
        self._num_turns_of[agent] = number + 1
        params = params if params.max_tokens <= room else dataclasses.replace(params, max_tokens=room)
        completion = await self._draw(
            SampleRequest(
                prompt_ids=prompt_ids,
                params=params,
                seed=derive_seed(self._seed, agent, number),
                session=f"{self._session}/{agent}",
            )
        )
        parsed = self._renderer.parse_response(completion.ids, prompt_ids, schemas or None)
        calls = tuple(self._identify(call) for call in parsed.tool_calls)
        parsed = dataclasses.replace(parsed, tool_calls=calls)
        index = self._recorder.record(
            prompt_ids=prompt_ids,
            completion_ids=completion.ids,
            extends=extends,
            logprobs=completion.logprobs if trained else None,
            policy_versions=completion.policy_versions,
            stop_reason=completion.stop_reason,
            temperature=params.temperature,
            state_key=state_key,
            agent=agent,
            parse_status=next((call.status for call in calls if call.status != "ok"), "ok"),
            tool_calls=calls,
            timing=TurnTiming(queued=completion.queued_seconds, generated=completion.generated_seconds),
        )
        return index, completion, parsed

    async def _draw(self, request: SampleRequest) -> Completion:
        try:
            return await self._draws.draw(self._sampler, request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._draws.over and not (task is not None and task.cancelling()):
                raise self._recorder.refusal() from None
            raise

    def _end(self, reason: StopReason) -> None:
        self.stop_reason = reason
        raise EpisodeOver(reason)

    def _identify(self, call: ToolCall) -> ToolCall:
        self._num_calls += 1
        return call if call.id else dataclasses.replace(call, id=f"call_{self._num_calls - 1}")

    def _copied(self, messages: Sequence[Message], agent: str) -> tuple[Message, ...]:
        """The messages as they are now; those that are what they were in the agent's last turn are copied once."""
        thread = self._threads.get(agent)
        known = thread.messages if thread is not None else ()
        if not same_messages(messages[: len(known)], known):
            known = ()
        try:
            return (*known, *copy.deepcopy(list(messages[len(known) :])))
        except Exception as error:  # what an environment puts into its messages raises what it likes
            raise EnvironmentFault(f"the messages cannot be copied: {error_text(error)}") from error

    async def _rendered(
        self, messages: tuple[Message, ...], schemas: Sequence[Mapping[str, Any]], names: tuple[str, ...], agent: str
    ) -> tuple[Int32, int | None]:
        """`_prompt`; of a long conversation on a thread, so that the event loop turns meanwhile."""
        if not (getattr(self._renderer, "thread_safe", False) and _is_long(messages)):
            return self._prompt(messages, schemas, names, agent)
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(_rendering_thread(), self._prompt, messages, schemas, names, agent)
        if self._draws.over:
            raise self._recorder.refusal()
        self._refuse_if_over()  # other agents went on meanwhile
        return made

    def _prompt(
        self, messages: tuple[Message, ...], schemas: Sequence[Mapping[str, Any]], names: tuple[str, ...], agent: str
    ) -> tuple[Int32, int | None]:
        """The next prompt, and the turn that it extends by a bridge."""
        thread = self._threads.get(agent)
        if thread is not None and thread.tools == names:
            known = len(thread.messages)
            if len(messages) > known and same_messages(messages[:known], thread.messages):
                bridged = self._renderer.bridge_to_next_turn(
                    thread.prompt_ids, thread.completion_ids, messages[known:], schemas or None
                )
                if bridged is not None:
                    return bridged, thread.turn
        return self._renderer.render_ids(messages, schemas or None, add_generation_prompt=True), None


@functools.cache
def _rendering_thread() -> ThreadPoolExecutor:
    """One for the process: rendering holds Python's lock, and of several threads each would wait for all others."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="verbatim-rendering")


def _is_long(messages: Sequence[Any]) -> bool:
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    characters = sum(len(content) for content in contents if isinstance(content, str))
    return len(messages) > _LONG_MESSAGES or characters > _LONG_CHARACTERS


def same_messages(messages: Any, others: Any) -> bool:
    """Whether a template would write them alike. Python's own 1 == 1.0 == True would be written differently."""
    if isinstance(messages, Mapping) and isinstance(others, Mapping):
        return messages.keys() == others.keys() and all(same_messages(messages[key], others[key]) for key in messages)
    if isinstance(messages, list | tuple) and isinstance(others, list | tuple):
        return len(messages) == len(others) and all(map(same_messages, messages, others))
    if isinstance(messages, bool | float) or isinstance(others, bool | float):
        return type(messages) is type(others) and messages == others
    return bool(messages == others)
