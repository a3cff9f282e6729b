"""Runs turns in exact ids: messages to prompt ids, prompt ids to a completion, completion to a message."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import RecordError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Int32, Message, StopReason, Turn, TurnTiming
from verbatim.inference.chat.protocol import ChatReply
from verbatim.inference.chat.stops import watch_for
from verbatim.inference.sampler import Completion, Sampler, SampleRequest, Watch
from verbatim.models.renderers.conversation import BreakReason, Conversation
from verbatim.models.renderers.renderer import ParsedResponse, Renderer
from verbatim.models.renderers.stop_ids import ends_within
from verbatim.rollouts.draws import Draws
from verbatim.rollouts.loop import RENDERED_ANEW, EpisodeLoop, EpisodeOver, Prompt, SampledAnswer, Thread
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.stopped_turns import end_with_stop, said_before_stop
from verbatim.rollouts.turn_arguments import checked_name, checked_trained
from verbatim.rollouts.turn_limiter import turn_limiter

_LONG_MESSAGES, _LONG_CHARACTERS = 128, 50_000
"""A chat template takes about 5 ms to render more, which is how long Python lets one thread run while others wait."""


class AgentLoop(EpisodeLoop):
    """Answers prompts with a sampler, ids in and ids out.

    Each agent's next prompt is its previous prompt and completion verbatim plus what is new (a bridge), by the rule in
    `renderers.bridge`. Where the rule has it rendered anew, the strategy will see a break, and `info` has the reason.
    That a bridge extends the ids exactly is verified by the recorder, never trusted.
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
        super().__init__(limits=limits, recorder=recorder)
        self.sampler, self.renderer = sampler, renderer
        ends = ends_within(renderer.stop_token_ids, sampler.vocab_size)
        self.params = dataclasses.replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))))
        """How tokens are drawn; the renderer's stop tokens included."""
        self._seed = seed
        self._session = str(seed) if session is None else session
        self._draws = Draws(recorder)
        self._knows_experts = False
        """Whether a completion came with its experts."""
        self._told: tuple[Message, ...] = ()
        self._num_turns_of: dict[str, int] = {}
        self._num_under_way = 0
        """Answers that are sampled, or wait to be read."""
        self._num_responses: Counter[bytes] = Counter()
        self._rendered_anew: list[dict[str, Any]] = []

    @property
    def info(self) -> Mapping[str, Any]:
        """The turns whose prompts were rendered anew, with the reasons."""
        return {RENDERED_ANEW: self._rendered_anew} if self._rendered_anew else {}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Everything that was recorded, in order."""
        return tuple(self.recorder.turns)

    async def complete(
        self, prompt_ids: Int32, params: SamplingParams, agent: str = "main", *, trained: bool = True
    ) -> Completion:
        """Record one turn of exact ids, for an environment that renders by itself, and return the completion.

        One that was cut off is returned too. With `trained=False` it is context only, and counted as `untrained`.

        Raises:
            EpisodeOver: no turn or token is left.
            EnvironmentFault: a name that is none.
            RecordError: the sampler returned what cannot be recorded, or the episode has ended.
            SamplerFault: the engine failed for good.
        """
        self._refuse_if_over()
        agent, trained = checked_name(agent), checked_trained(trained)
        completion = await self._sample_ids(prompt_ids, params, agent)
        prompt = Prompt(agent=agent, messages=(), schemas=(), tools=(), thread=None, num_known=0, trained=trained)
        answer = self._read(completion, prompt_ids, prompt, params)
        self._record(answer, prompt, None)
        return completion

    async def respond(
        self,
        prompt: Prompt,
        params: SamplingParams,
        read: Callable[[Completion, Int32], ChatReply],
        seed: int | None = None,
        watching: Callable[[Int32], Watch | None] | None = None,
    ) -> tuple[ChatReply, Thread]:
        """Record one turn of a conversation that the caller keeps: `prompt.thread` is what it continues. Many may be
        under way at once, also of one agent, and none of them ends the episode for the others.

        Args:
            prompt: All messages, and how many of them the thread covers.
            params: How the turn is sampled; the renderer's stop tokens included.
            read: The completion and the prompt's ids as a reply, whose ids are the first ones of the completion; the
                tokens behind them are counted as cut off.
            seed: Of the turn; by default it depends on the prompt and on the number of turns before that had the same
                one, not on the order of others.
            watching: Given the prompt's ids, the one who watches the completion's tokens as they are drawn, where the
                sampler shows them; None: no one.

        Raises:
            EpisodeOver: no turn is left; or this prompt leaves no room in the context, and a shorter one may; or the
                engine stopped.
            RecordError: the sampler returned what cannot be recorded, or the episode has ended.
            SamplerFault: the engine failed for good.
        """
        self._refuse_if_over()
        conversation = await self._rendered(prompt)
        prompt_ids = conversation.prompt_ids
        if self.room_for(len(prompt_ids)) <= 0:
            raise EpisodeOver(StopReason.LENGTH)
        digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=16).digest()
        own_seed = derive_seed(self._seed, "response", digest.hex(), self._num_responses[digest])
        self._num_responses[digest] += 1
        start = self._num_routed(prompt_ids, prompt.agent)
        completion = await self._sample_ids(
            prompt_ids,
            params,
            prompt.agent,
            own_seed if seed is None else seed,
            None if watching is None else watching(prompt_ids),
        )
        reply = read(completion, prompt_ids)
        self.offers_tools |= bool(prompt.schemas)
        answer = self.last_answer = self._replied(reply, completion, prompt, conversation, params.temperature, start)
        thread = self._threads[prompt.agent] = Thread(
            turn=self._record(answer, prompt, None),
            messages=(*prompt.messages, answer.message),
            tools=prompt.tools,
            answer=answer,
        )
        if reply.stop_reason is StopReason.CANCELLED:
            self._end(reply.stop_reason)
        return reply, thread

    async def count_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt that is not sampled from."""
        made = await self._on_thread(prompt) if self._is_long(prompt) else self._conversation(prompt)
        return len(made.prompt_ids)

    def room_for(self, num_prompt_tokens: int) -> int:
        """Tokens that a prompt of this length leaves for its completion; 0 or less = none."""
        context = min(self.limits.max_context, self.sampler.context_length)
        if num_prompt_tokens >= context:
            self.no_room = (num_prompt_tokens, context)
        return context - num_prompt_tokens

    def tell(self, messages: Sequence[Message]) -> None:
        """Keep the messages of the turns of `complete`, for people: only the environment knows them."""
        self._told = tuple(messages)

    def messages(self, agent: str = "main") -> tuple[Message, ...]:
        """Everything the agent has been given and has said, up to its last turn."""
        return super().messages(agent) if agent in self._threads else self._told

    async def end(self) -> bool:
        """End the episode: cut off what is still being sampled or not read yet, and count it. Returns whether anything
        was."""
        unread = self._num_under_way > 0 and not self._draws.over
        return await self._draws.end() or unread

    def _refuse_if_over(self) -> None:
        if self.stop_reason is None and self._draws.over:
            raise self.recorder.went_on()
        super()._refuse_if_over()

    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        conversation = await self._rendered(prompt)
        prompt_ids = conversation.prompt_ids
        self.recorder.foresee(prompt_ids)
        if self.in_order and prompt.thread is not None:
            prompt.thread.answer.free_arrays()
        self._num_under_way += 1
        try:
            completion = await self._sample_ids(prompt_ids, self.params, prompt.agent)
            await turn_limiter().enter()
        finally:
            self._num_under_way -= 1
        if self._draws.over:
            raise self.recorder.refusal()  # the episode ended while it waited to be read
        return self._read(completion, prompt_ids, prompt, self.params, conversation)

    async def _rendered(self, prompt: Prompt) -> Conversation:
        """`_conversation`; of a long conversation on a thread, unless the episode is over by then."""
        if not self._is_long(prompt):
            return self._conversation(prompt)
        made = await self._on_thread(prompt)
        if self._draws.over:
            raise self.recorder.refusal()
        self._refuse_if_over()  # other agents went on meanwhile
        return made

    def _is_long(self, prompt: Prompt) -> bool:
        """Whether a prompt is rendered on a thread, so that the event loop turns meanwhile."""
        return getattr(self.renderer, "thread_safe", False) and _is_long(prompt.messages)

    async def _on_thread(self, prompt: Prompt) -> Conversation:
        return await asyncio.get_running_loop().run_in_executor(_rendering_thread(), self._conversation, prompt)

    def _conversation(self, prompt: Prompt) -> Conversation:
        """The next prompt: what continues the agent's last turn, or else rendered anew."""
        thread, schemas, num_known = prompt.thread, prompt.schemas or None, prompt.num_known
        before = None if thread is None else thread.answer.conversation
        if thread is None or before is None:
            return Conversation.open(self.renderer, prompt.messages, schemas)
        if not 0 < num_known < len(prompt.messages):
            return Conversation.open(self.renderer, prompt.messages, schemas, BreakReason.HISTORY_EDITED)
        if thread.tools != prompt.tools:
            return Conversation.open(self.renderer, prompt.messages, schemas, BreakReason.TOOLS_CHANGED)
        return before.retold(prompt.messages[:num_known]).continued(prompt.messages[num_known:], schemas)

    async def _sample_ids(
        self,
        prompt_ids: Int32,
        params: SamplingParams,
        agent: str,
        seed: int | None = None,
        watch: Watch | None = None,
    ) -> Completion:
        """One completion, in the room that is left; by default with the seed of the agent's next turn."""
        room = self.room_for(len(prompt_ids))
        if room <= 0:
            self._end(StopReason.LENGTH)
        most = self._within_budget(min(room, params.max_tokens))
        self._begin_turn()
        number = self._num_turns_of.get(agent, 0)
        self._num_turns_of[agent] = number + 1
        request = SampleRequest(
            prompt_ids=prompt_ids,
            params=params
            if params.max_tokens == most and not params.stop
            else dataclasses.replace(params, max_tokens=most, stop=()),
            seed=derive_seed(self._seed, agent, number) if seed is None else seed,
            session=f"{self._session}/{agent}",
            routed_experts_start=self._num_routed(prompt_ids, agent),
        )
        watch = watch_for(params.stop, self.renderer.decode, watch)
        self._num_promised_tokens += most
        try:
            if self.in_order and watch is None:
                completion = await self._draws.draw_alone(self.sampler, request)
            else:
                completion = await self._draws.draw(self.sampler, request, watch)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._draws.over and not (task is not None and task.cancelling()):
                raise self.recorder.refusal() from None
            raise
        finally:
            self._num_promised_tokens -= most
        completion = end_with_stop(completion, request, params.stop, self.renderer.decode)
        self._num_completion_tokens += len(completion.ids)
        if params.needs_kept_sets and completion.kept_sets is None and len(completion.ids):
            raise RecordError(
                f"a completion of {len(completion.ids)} ids came without its kept sets, so nothing says among which "
                "ids they were drawn; expected a sampler that returns them where top_p, top_k or min_p cut"
            )
        return completion

    def _num_routed(self, prompt_ids: Int32, agent: str) -> int:
        return self.recorder.num_routed(prompt_ids, agent) if self._knows_experts else 0

    def _record(self, answer: SampledAnswer, prompt: Prompt, state_key: str | None) -> int:
        index = super()._record(answer, prompt, state_key)
        broken = None if answer.conversation is None else answer.conversation.broken
        if broken is not None and prompt.thread is not None:
            turns, after = self.recorder.turns, prompt.thread.turn
            if not turns[index].extends(turns[after]):
                self._rendered_anew.append({"turn": index, "after": after, "reason": str(broken)})
        return index

    def _read(
        self,
        completion: Completion,
        prompt_ids: Int32,
        prompt: Prompt,
        params: SamplingParams,
        conversation: Conversation | None = None,
    ) -> SampledAnswer:
        """The completion as a message, with what is recorded of it. A stop string is in the ids, not in the message."""
        parsed = self.renderer.parse_response(completion.ids, prompt_ids, prompt.schemas or None)
        if parsed.tool_calls:
            parsed = ParsedResponse(
                content=parsed.content,
                reasoning_content=parsed.reasoning_content,
                tool_calls=tuple(map(self._identify, parsed.tool_calls)),
                thought_open=parsed.thought_open,
            )
        said = said_before_stop(parsed, completion.ids, params.stop, self.renderer.decode)
        message = said.message()
        if conversation is not None:
            conversation = conversation.answered(completion.ids, parsed, message, said.tool_calls)
        self._knows_experts |= completion.routed_experts is not None
        return SampledAnswer(
            message=message,
            tool_calls=said.tool_calls,
            stop_reason=completion.stop_reason,
            prompt_ids=prompt_ids,
            completion_ids=completion.ids,
            extends=_extended(conversation, prompt),
            conversation=conversation,
            logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            temperature=params.temperature,
            routed_experts=completion.routed_experts,
            kept_sets=completion.kept_sets,
            timing=TurnTiming(queued=completion.queued_seconds, generated=completion.generated_seconds),
        )

    def _replied(
        self,
        reply: ChatReply,
        completion: Completion,
        prompt: Prompt,
        conversation: Conversation,
        temperature: float,
        routed_from: int,
    ) -> SampledAnswer:
        """A reply, which may end before the completion does, with what is recorded of it."""
        experts, prompt_ids = completion.routed_experts, conversation.prompt_ids
        self._knows_experts |= experts is not None
        conversation = conversation.answered(reply.ids, None, reply.message, reply.tool_calls)
        return SampledAnswer(
            message=reply.message,
            tool_calls=reply.tool_calls,
            stop_reason=reply.stop_reason,
            prompt_ids=prompt_ids,
            completion_ids=reply.ids,
            extends=_extended(conversation, prompt),
            conversation=conversation,
            logprobs=reply.logprobs,
            policy_versions=reply.policy_versions,
            routed_experts=None if experts is None else experts[: len(prompt_ids) + len(reply.ids) - 1 - routed_from],
            kept_sets=None if completion.kept_sets is None else completion.kept_sets.first(len(reply.ids)),
            temperature=temperature,
            timing=TurnTiming(queued=completion.queued_seconds, generated=completion.generated_seconds),
        )


def _extended(conversation: Conversation | None, prompt: Prompt) -> int | None:
    """The turn that a prompt continues as it was sampled; None: none."""
    continues = conversation is not None and conversation.extends and prompt.thread is not None
    return prompt.thread.turn if continues and prompt.thread is not None else None


@functools.cache
def _rendering_thread() -> ThreadPoolExecutor:
    """One for the process: rendering holds Python's lock, and of several threads each would wait for all others."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="verbatim-rendering")


def _is_long(messages: Sequence[Any]) -> bool:
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    characters = sum(len(content) for content in contents if isinstance(content, str))
    return len(messages) > _LONG_MESSAGES or characters > _LONG_CHARACTERS
