"""Samples turns in exact ids: converts messages to prompt ids, samples a completion, and parses the completion into a
message."""

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
from verbatim.rollouts.loop import RENDERED_AGAIN, EpisodeLoop, EpisodeOver, Prompt, SampledAnswer, Thread
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.stopped_turns import end_with_stop, said_before_stop
from verbatim.rollouts.turn_arguments import checked_name, checked_trained
from verbatim.rollouts.turn_limiter import turn_limiter

_LONG_MESSAGES, _LONG_CHARACTERS = 128, 50_000
"""A prompt with more than `_LONG_MESSAGES` messages or more than `_LONG_CHARACTERS` characters is rendered on a thread.
A chat template takes about 5 ms for a prompt of this size. That is Python's thread switch interval, so rendering a
shorter prompt would gain nothing from a thread."""


class AgentLoop(EpisodeLoop):
    """Answers prompts with a token-in, token-out sampler.

    Each agent's next prompt is its previous prompt and completion verbatim, followed by the new messages (a bridge).
    Where the rule in `renderers.bridge` does not allow a bridge, the prompt is rendered from scratch: the strategy
    will then see a break, and `info` has the reason. The recorder verifies that each bridged prompt begins with the ids
    of the previous prompt and completion.
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
        """Sampling parameters, with the renderer's stop tokens added."""
        self._seed = seed
        self._session = str(seed) if session is None else session
        self._draws = Draws(recorder)
        self._knows_experts = False
        """True once a completion has included routed experts. Until then, the search in `num_routed` is skipped."""
        self._told: tuple[Message, ...] = ()
        self._num_turns_of: dict[str, int] = {}
        self._num_under_way = 0
        """Number of answers that are being sampled or waiting to be parsed."""
        self._num_responses: Counter[bytes] = Counter()
        self._rendered_again: list[dict[str, Any]] = []

    @property
    def info(self) -> Mapping[str, Any]:
        """The entry of the trajectory's `info` that lists the turns whose prompts were rendered from scratch, each with
        the reason."""
        return {RENDERED_AGAIN: self._rendered_again} if self._rendered_again else {}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The recorded turns, in order of sampling."""
        return tuple(self.recorder.turns)

    async def complete(
        self, prompt_ids: Int32, params: SamplingParams, agent: str = "main", *, trained: bool = True
    ) -> Completion:
        """Sample and record one turn from exact ids, for an environment that renders prompts itself.

        A completion that was cut off is returned like any other, without an exception. With `trained=False` the turn is
        context only, and its tokens are counted as `untrained`.

        Raises:
            EpisodeOver: no turns or tokens are left.
            EnvironmentFault: the agent name is invalid.
            RecordError: the sampler's completion cannot be recorded, or the episode has ended.
            SamplerFault: the engine failed, and retries did not help.
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
        """Sample and record one turn of a conversation whose history the caller (the gateway) keeps. Several calls may
        run concurrently, even for one agent; a call that fails does not end the episode for the other calls.

        Args:
            prompt: All messages, the thread that they continue, and how many of these messages the thread covers.
            params: Sampling parameters, including the renderer's stop tokens.
            read: Parses a completion, given also the prompt's ids. The ids of the reply that it returns may be a prefix
                of the completion's ids; the remaining tokens are counted as cut off.
            seed: Seed of the turn. By default it is derived from the prompt and from the number of earlier turns with
                the same prompt, so it does not depend on the order of concurrent requests.
            watching: Given the prompt's ids, creates a watcher that sees the completion's tokens as they are sampled,
                for samplers that stream; None for no watcher.

        Returns:
            The reply, and the thread that a later prompt may continue.

        Raises:
            EpisodeOver: no turns are left, the engine stopped, or this prompt leaves no room in the context (a shorter
                prompt may still fit).
            RecordError: the sampler's completion cannot be recorded, or the episode has ended.
            SamplerFault: the engine failed, and retries did not help.
        """
        self._refuse_if_over()
        conversation = await self._rendered(prompt)
        prompt_ids = conversation.prompt_ids
        if self.room_for(len(prompt_ids)) <= 0:
            raise EpisodeOver(StopReason.LENGTH)  # not `_end`: other conversations of the session may continue
        # The turn's seed depends on the prompt and not on how many requests the session has had, because concurrent
        # requests arrive in any order. The count of equal prompts gives each of them a different seed.
        digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=16).digest()
        own_seed = derive_seed(self._seed, "response", digest.hex(), self._num_responses[digest])
        self._num_responses[digest] += 1
        start = self._num_routed(prompt_ids, prompt.agent)  # now: concurrent turns of the agent may change it
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
        """Count the tokens of a prompt without sampling."""
        made = await self._on_thread(prompt) if self._is_long(prompt) else self._conversation(prompt)
        return len(made.prompt_ids)

    def room_for(self, num_prompt_tokens: int) -> int:
        """Return the number of tokens that a prompt of this length leaves for its completion; may be 0 or negative."""
        context = min(self.limits.max_context, self.sampler.context_length)
        if num_prompt_tokens >= context:
            self.no_room = (num_prompt_tokens, context)
        return context - num_prompt_tokens

    def tell(self, messages: Sequence[Message]) -> None:
        """Set the messages to display for the turns that `complete` samples. Only the environment knows these
        messages."""
        self._told = tuple(messages)

    def messages(self, agent: str = "main") -> tuple[Message, ...]:
        """The agent's prompt messages and answers, up to and including its last turn."""
        return super().messages(agent) if agent in self._threads else self._told

    async def end(self) -> bool:
        """End the episode: cancel requests in flight, discard completions that are not yet parsed, and count their
        tokens. Returns True if there were such requests or completions."""
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
        # The prompt is built, so nothing needs the arrays of the last turn any more.
        if self.in_order and prompt.thread is not None:
            prompt.thread.answer.free_arrays()
        self._num_under_way += 1
        # The completions of a batch arrive together. The limiter spreads their parsing over time, so that timers and
        # sockets are served in between.
        try:
            completion = await self._sample_ids(prompt_ids, self.params, prompt.agent)
            await turn_limiter().enter()
        finally:
            self._num_under_way -= 1
        if self._draws.over:
            raise self.recorder.refusal()  # the episode ended while the completion waited to be parsed
        return self._read(completion, prompt_ids, prompt, self.params, conversation)

    async def _rendered(self, prompt: Prompt) -> Conversation:
        """Render the prompt, on a thread if it is long. Raises an error if the episode has ended in the meantime."""
        if not self._is_long(prompt):
            return self._conversation(prompt)
        made = await self._on_thread(prompt)
        if self._draws.over:
            raise self.recorder.refusal()
        self._refuse_if_over()  # other agents may have used up the limits in the meantime
        return made

    def _is_long(self, prompt: Prompt) -> bool:
        """Return True if the prompt should be rendered on a thread, so that it does not block the event loop."""
        return getattr(self.renderer, "thread_safe", False) and _is_long(prompt.messages)

    async def _on_thread(self, prompt: Prompt) -> Conversation:
        return await asyncio.get_running_loop().run_in_executor(_rendering_thread(), self._conversation, prompt)

    def _conversation(self, prompt: Prompt) -> Conversation:
        """Render the agent's next prompt: bridge it from the agent's last turn if possible, else render from
        scratch."""
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
        """Sample one completion within the remaining token budget. By default its seed is derived from the
        episode's seed, the agent's name and the number of turns that the agent has had."""
        room = self.room_for(len(prompt_ids))
        if room <= 0:
            self._end(StopReason.LENGTH)
        most = self._within_budget(min(room, params.max_tokens))
        self._begin_turn()
        # Seeds are derived from an agent's own count of turns, so they do not depend on how agents interleave.
        number = self._num_turns_of.get(agent, 0)
        self._num_turns_of[agent] = number + 1
        request = SampleRequest(
            prompt_ids=prompt_ids,
            # Stop strings are cut here and not by the engine, so that the ids include the token that completes a stop
            # string, and so that the engine need not support stop strings.
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
            # `Draws.end` cancels the request, not this task. So if the episode is over and nobody has cancelled this
            # task, raise an ordinary error.
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
                f"a completion of {len(completion.ids)} ids came without its kept sets, so the distribution that they "
                "were sampled from is unknown; expected a sampler that returns them with top_p, top_k or min_p"
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
                self._rendered_again.append({"turn": index, "after": after, "reason": str(broken)})
        return index

    def _read(
        self,
        completion: Completion,
        prompt_ids: Int32,
        prompt: Prompt,
        params: SamplingParams,
        conversation: Conversation | None = None,
    ) -> SampledAnswer:
        """Parse a completion into an answer. A stop string stays in the answer's ids but is cut from the answer's
        message."""
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
        """Build the answer to record from a reply, whose ids may be a prefix of the completion's ids."""
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
    """Return the index of the turn that the prompt extends by a bridge, or None if the prompt was rendered from
    scratch."""
    continues = conversation is not None and conversation.extends and prompt.thread is not None
    return prompt.thread.turn if continues and prompt.thread is not None else None


@functools.cache
def _rendering_thread() -> ThreadPoolExecutor:
    """Return the only rendering thread of the process. More threads would only delay each other, since rendering holds
    the GIL."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="verbatim-rendering")


def _is_long(messages: Sequence[Any]) -> bool:
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    characters = sum(len(content) for content in contents if isinstance(content, str))
    return len(messages) > _LONG_MESSAGES or characters > _LONG_CHARACTERS
