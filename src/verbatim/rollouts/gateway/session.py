"""One episode behind the gateway: answers chat requests, and records each reply as a turn."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from verbatim.core.errors import RecordError, RolloutError, SamplerFault
from verbatim.core.sampling import SamplingParams
from verbatim.core.tasks import run_together
from verbatim.core.types import Int32, Message, StopReason
from verbatim.inference.chat.protocol import ChatReply, ChatRequest
from verbatim.inference.chat.reply import read_reply
from verbatim.inference.chat.stops import watch_for
from verbatim.inference.http.refused import Refused
from verbatim.inference.sampler import Completion, SampleRequest, Watch
from verbatim.inference.validation import check_prompt
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.gateway.delivery import AnswerProgress, Delivery
from verbatim.rollouts.gateway.exchanges import Exchanges, RequestExchange
from verbatim.rollouts.gateway.readable import readable
from verbatim.rollouts.gateway.session_settings import AnswerWatch, SessionSettings
from verbatim.rollouts.gateway.threads import BranchReason, Match, Threads
from verbatim.rollouts.loop import EpisodeOver, Prompt, Thread
from verbatim.rollouts.seeds import derive_seed

INFO = "gateway"
"""Key of `Trajectory.info` under which the gateway stores the counts and branches of the episode."""
_MOST_BRANCHES = 1000
"""Maximum number of branches that are listed individually. Further branches are only counted."""
_MOST_FRESH = 32
"""Number of turns whose prompts are kept as arrays, which saves rebuilding them from the token tree. The number is
small because few conversations are active at a time, and because arrays for all turns would take memory quadratic in
the length of a conversation."""


@dataclass(eq=False)
class _ContinuableTurn:
    """A sampled turn that a later request may continue."""

    thread: Thread
    schemas: tuple[Mapping[str, Any], ...]


class Session:
    """Answers the requests of one episode and records each answer as a turn.

    Args:
        loop: Samples and records the turns.
        settings: Settings of the session; None for the defaults.
    """

    def __init__(self, loop: AgentLoop, settings: SessionSettings | None = None) -> None:
        self.loop = loop
        self.settings = settings or SessionSettings()
        self.exchanges: Exchanges[Any] = Exchanges(self.settings.patience)
        self.reward: Any = None
        """The reward that the agent program posted, or None."""
        self.over = False
        """True once the session has ended; requests are then refused."""
        self.counts: Counter[str] = Counter()
        """Counts by name, of requests and of events: "requests", "overridden/temperature", "branches/sub_agent", ..."""
        self._record_fault: RecordError | None = None
        self._sampler_faults: dict[object, SamplerFault] = {}
        self.first_request: float | None = None
        """Time of the first request, by `time.monotonic`; None if there was no request yet."""
        self.watch: AnswerWatch | None = None
        """Observer of requests and answers, or None if there is no observer."""
        self.last_stop: StopReason = StopReason.STOP
        """The reason why the last reply ended or was refused."""
        self._threads: Threads[_ContinuableTurn] = Threads(restores_reasoning=self._restores_reasoning())
        self._fresh: OrderedDict[int, _ContinuableTurn] = OrderedDict()
        self._branches: list[dict[str, Any]] = []
        self._num_open = 0
        self._num_arriving = 0
        """Number of requests whose bodies are being read."""
        self._num_calls = 0
        self._delivery = Delivery()

    @property
    def num_requests(self) -> int:
        """Number of requests so far, including retries and refused requests."""
        return self.counts["requests"]

    @property
    def fault(self) -> RolloutError | None:
        """The fault that makes the episode fail, or None. It is the first RecordError. If there is no RecordError, it
        is a sampler fault that a client got as the answer to a prompt, unless a later request with the same prompt
        succeeded."""
        return self._record_fault or next(iter(self._sampler_faults.values()), None)

    @property
    def info(self) -> dict[str, Any]:
        """The entry `info["gateway"]` of the trajectory: the counts, and each branch with its reason."""
        counts = {
            **self.counts,
            "repeated": self.exchanges.num_repeated,
            "left": self.exchanges.num_left,
            "reasoning_restored": self._threads.num_restored,
        }
        return {"counts": {name: count for name, count in sorted(counts.items()) if count}, "branches": self._branches}

    @contextlib.contextmanager
    def arriving(self, kind: str = "requests") -> Iterator[None]:
        """Context manager that counts a request as open while its body is being read. Call `admit` afterwards.

        Raises:
            Refused: as for `admit`, but before the body is read.
        """
        self._refuse_if_full(kind)
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    def admit(self, kind: str = "requests") -> None:
        """Count a request, or refuse it.

        Args:
            kind: Name under which the request is counted; `max_requests` applies to each kind separately.

        Raises:
            Refused: the session is over, too many requests are open, or `max_requests` is used up.
        """
        self._refuse_if_full(kind)
        self.counts[kind] += 1
        if self.first_request is None and kind == "requests":
            self.first_request = time.monotonic()

    def _refuse_if_full(self, kind: str) -> None:
        if self.over:
            raise Refused(410, "this session is over", "session_over")
        num_open = max(self._num_open, self.exchanges.num_waiting) + self._num_arriving
        if num_open >= self.settings.max_open:
            raise Refused(429, f"this session has more than {self.settings.max_open} open requests")
        if self.counts[kind] >= self.settings.max_requests:
            raise Refused(403, f"this session has made more than {self.settings.max_requests} requests", "max_requests")

    async def answer(
        self,
        request: ChatRequest,
        *,
        agent: str = "",
        thread: str = "",
        trained: bool = True,
        body: Mapping[str, Any] | None = None,
        progress: AnswerProgress | None = None,
    ) -> list[ChatReply]:
        """Sample and record `request.n` replies.

        Args:
            request: The parsed request.
            agent: The agent's name, or "" if the request has none.
            thread: Identifier of the client's agent or conversation, or "" if the request has none.
            trained: False if the sampled tokens are to be context only.
            body: The request's JSON, which is passed to `watch`.
            progress: Receives the ids as they are sampled, if the client wants a stream and the sampler can stream.

        Raises:
            Refused: no turns are left, or the prompt leaves no room in the context.
            VerbatimError: the messages cannot be rendered, or the sampler failed.
        """
        for name in request.unenforced:
            self.counts[f"unenforced/{name}"] += 1
        match = self._threads.match(request.messages, request.tools, agent, thread)
        if self.watch is not None and body is not None:
            self.watch.placed(request, body, {place: kept.thread.turn for place, kept in match.turns.items()})
        answered, may_come_again = False, False
        try:
            with self._answering(match.end, progress):
                params = self._params(request)
                if params.stop:  # the run's own stop strings: `read_reply` cuts at these and the request's alike
                    request = dataclasses.replace(request, stop=tuple(dict.fromkeys((*request.stop, *params.stop))))
                    params = dataclasses.replace(params, stop=())
                prompt = self._prompt(match, request, trained=trained and params.temperature > 0)
                each = [self._one(match, prompt, params, request, progress, k) for k in range(request.n)]
                replies = await run_together(each) if request.n > 1 else [await each[0]]
                answered = True
                return replies
        except SamplerFault:
            may_come_again = True
            raise
        finally:
            # Messages of refused requests are dropped, otherwise a client could fill the memory with them. After a
            # sampler fault they are kept: the client may retry.
            self._threads.close(match, answered=answered, forget=not answered and not may_come_again)

    async def complete(
        self, request: SampleRequest, *, agent: str = "", trained: bool = True, progress: AnswerProgress | None = None
    ) -> Completion:
        """Sample and record one turn from exact ids, for a client that renders prompts itself. The turn extends those
        earlier turns with which its prompt begins.

        Args:
            request: The request. Its seed and session are ignored: the episode has its own seed and session.
            agent: The agent's name; "" means "main".
            trained: False if the sampled tokens are to be context only.
            progress: Tracks the answer for a client that waits for it; None if no client waits.

        Raises:
            Refused: no turns are left, or the prompt leaves no room in the context.
            RecordError: the completion cannot be recorded, or the prompt has ids outside the vocabulary.
            SamplerFault: the sampler failed.
        """
        sampler, prompt = self.loop.sampler, request.prompt_ids.tobytes()
        params = dataclasses.replace(request.params, stop=self.loop.params.stop)  # requests in ids have no stop strings
        # Plus 1: a prompt that fills the context exactly passes this check and is refused below, with the protocol's
        # own error.
        check_prompt(request, vocab_size=sampler.vocab_size, context_length=sampler.context_length + 1)
        if self.settings.sampling == "run":
            own = self.loop.params
            ends = tuple(dict.fromkeys((*own.stop_token_ids, *params.stop_token_ids)))
            most = min(params.max_tokens, own.max_tokens)
            params = dataclasses.replace(own, max_tokens=most, stop_token_ids=ends)
        with self._answering(prompt, progress):
            if self.loop.room_for(len(request.prompt_ids)) <= 0:
                raise EpisodeOver(StopReason.LENGTH)
            completion = await self.loop.complete(request.prompt_ids, params, agent or "main", trained=trained)
            self._delivery.went_on(self.loop.recorder.turns)
            self._delivery.sends(len(self.loop.recorder.turns) - 1, progress)
            self.last_stop = completion.stop_reason
            return completion

    @contextlib.contextmanager
    def _answering(self, prompt: object, progress: AnswerProgress | None) -> Iterator[None]:
        """Context manager in which a prompt is answered: counts the prompt as open, and keeps a failure for `fault`.

        Raises:
            Refused: the block raised an EpisodeOver.
        """
        self._num_open += 1
        try:
            yield
            self._sampler_faults.pop(prompt, None)  # a retry of the failed prompt has succeeded
        except EpisodeOver as over:
            self.last_stop = over.stop_reason
            raise self._refusal(over) from None
        except RecordError as fault:
            self._record_fault = self._record_fault or fault
            raise
        except SamplerFault as fault:
            if progress is None or progress.num_waiting:  # otherwise no client is left that the failure could affect
                self._sampler_faults.setdefault(prompt, fault)
            raise
        finally:
            self._num_open -= 1

    async def count_tokens(self, request: ChatRequest) -> int:
        """Count the tokens of a request's prompt. Renders the prompt from scratch, since clients may ask for
        the count before they send the request itself."""
        prompt = Prompt(
            agent="",
            messages=tuple(map(readable, request.messages)),
            schemas=request.tools,
            tools=(),
            thread=None,
            num_known=0,
        )
        self._num_open += 1
        try:
            return await self.loop.count_tokens(prompt)
        finally:
            self._num_open -= 1

    def delivered(self, exchange: RequestExchange[Any]) -> None:
        """Mark an answer as sent in full to a client."""
        exchange.delivered = True
        self._delivery.arrived(*exchange.progress.turns)

    async def end(self) -> None:
        """End the session: cancel the requests in flight and count their tokens. Answers that no client received in
        full become untrained context, unless the setting `train_undelivered` is True."""
        self.over = True
        await self.exchanges.end()
        self.counts.update(self._delivery.settle(self.loop.recorder, trained=self.settings.train_undelivered))

    async def _one(
        self,
        match: Match[_ContinuableTurn],
        prompt: Prompt,
        params: SamplingParams,
        request: ChatRequest,
        progress: AnswerProgress | None,
        number: int,
    ) -> ChatReply:
        def read(completion: Completion, prompt_ids: Int32) -> ChatReply:
            return read_reply(completion, request, self.loop.renderer, prompt_ids, call_id=self._call_id)

        def watching(prompt_ids: Int32) -> Watch | None:
            show = None
            if progress is not None and request.stream:
                progress.prompt_ids = prompt_ids
                show = partial(progress.show, number)
            return watch_for(request.stop, self.loop.renderer.decode, show)

        seed = request.sampling.seed if self.settings.sampling == "client" else None
        if seed is not None and number:  # the first of several replies uses the seed; the others derive theirs from it
            seed = derive_seed(seed, number)
        reply, thread = await self.loop.respond(prompt, params, read, seed, watching)
        self.last_stop = reply.stop_reason
        self.counts["cut_tokens"] += reply.num_cut_tokens
        # A client that sends an answer back must have received it, even if its connection broke.
        self._delivery.arrived(*(known.thread.turn for known in match.turns.values()))
        self._delivery.sends(thread.turn, progress)
        # The tree of `self._threads` has the messages, so a copy in every turn would only take memory.
        without_messages = _changed(thread, answer={}, conversation={"messages": ()}, messages=())
        kept = _ContinuableTurn(thread=without_messages, schemas=tuple(prompt.schemas))
        others = self._threads.answer(match, reply.message, kept)
        self._refresh(kept)
        if self.watch is not None:
            self.watch.answered(request, reply, thread.turn)
        reason, found = match.reason, match.found
        if reason is None and others:
            reason, found = BranchReason.SAME_PROMPT, "one of several answers to one request"
        if reason is None and (before := self._not_extended(match, thread.turn)) is not None:
            reason = BranchReason.RENDERED_AGAIN
            why = thread.answer.conversation and thread.answer.conversation.broken
            found = f"the prompt was rendered from scratch ({why}), and does not extend turn {before}"
        if reason is not None:
            self._note_branch(thread.turn, match, reason, found)
        return reply

    def _not_extended(self, match: Match[_ContinuableTurn], turn: int) -> int | None:
        """Return the index of the turn that the new turn continues but whose ids the new prompt does not extend. Return
        None if the new prompt extends those ids, or if the new turn continues no turn."""
        if match.known is None or match.known.turn is None:
            return None
        turns, before = self.loop.recorder.turns, match.known.turn.thread.turn
        return None if turns[turn].extends(turns[before]) else before

    def _restores_reasoning(self) -> bool:
        """Return True if the reasoning is restored in answers that a client sends back without it. By default it is
        restored only for renderers that keep the history verbatim. With history = "template" the chat template decides
        from the messages alone, as on a stateless server, so nothing may be added to the messages."""
        if self.settings.restores_reasoning is not None:
            return self.settings.restores_reasoning
        return getattr(self.loop.renderer, "history", "template") == "verbatim"

    def _call_id(self, index: int) -> str:
        self._num_calls += 1
        return f"call_{self._num_calls - 1}"

    def _prompt(self, match: Match[_ContinuableTurn], request: ChatRequest, *, trained: bool) -> Prompt:
        """Build the prompt for the agent loop. If the request continues a turn, the prompt uses the messages and tools
        as they were when that turn was sampled, because a client may send them back changed."""
        messages: tuple[Message, ...] = tuple(map(readable, match.messages))
        if match.known is None or not match.bridges:
            schemas: Sequence[Mapping[str, Any]] = request.tools
            return Prompt(
                agent=match.agent,
                messages=messages,
                schemas=schemas,
                tools=tuple(map(str, schemas)),
                thread=None,
                num_known=0,
                trained=trained,
            )
        kept = match.known.turn
        assert kept is not None
        self._refresh(kept)
        return Prompt(
            agent=match.agent,
            messages=messages,
            schemas=kept.schemas,
            tools=kept.thread.tools,
            thread=kept.thread,
            num_known=match.num_known,
            trained=trained,
        )

    def _refresh(self, kept: _ContinuableTurn) -> None:
        """Keep the prompt of this turn as one array, and free the array of the least recently used turn."""
        index = kept.thread.turn
        if kept.thread.answer.prompt_ids is None:
            kept.thread = _with_prompt(kept.thread, self.loop.recorder.turns[index].prompt_ids)
        self._fresh[index] = kept
        self._fresh.move_to_end(index)
        if len(self._fresh) > _MOST_FRESH:
            _, old = self._fresh.popitem(last=False)
            old.thread = _with_prompt(old.thread, None)

    def _params(self, request: ChatRequest) -> SamplingParams:
        """Return the sampling parameters of a turn. `max_tokens` is the smaller of the request's and the run's."""
        own, asked = self.loop.params, request.sampling
        most = own.max_tokens if asked.max_tokens is None else min(asked.max_tokens, own.max_tokens)
        if self.settings.sampling == "client":
            ends = tuple(i for i in own.stop_token_ids if i < self.loop.sampler.vocab_size)
            try:
                return asked.params(own, room=most, end_ids=ends)
            except ValueError as error:
                raise Refused(400, str(error)) from None
        for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
            value = getattr(asked, name)
            if value is not None and value != getattr(own, name, None):
                self.counts[f"overridden/{name}"] += 1
        if asked.ignore_eos:
            self.counts["overridden/ignore_eos"] += 1
        ends = tuple(dict.fromkeys((*own.stop_token_ids, *asked.stop_token_ids)))
        return dataclasses.replace(own, max_tokens=most, stop_token_ids=ends)

    def too_long(self) -> Refused:
        """Return the refusal of a request whose text is too long for the context, so that the request need not be
        rendered."""
        self.last_stop = StopReason.LENGTH
        return self._refusal(EpisodeOver(StopReason.LENGTH))

    def _refusal(self, over: EpisodeOver) -> Refused:
        if over.stop_reason is StopReason.LENGTH and self.loop.tokens_left is not None and self.loop.tokens_left <= 0:
            most_sampled = self.loop.limits.max_total_completion_tokens
            return Refused(
                403, f"the episode's {most_sampled} sampled tokens are used up", "max_total_completion_tokens"
            )
        if over.stop_reason is StopReason.LENGTH:
            most = min(self.loop.limits.max_context, self.loop.sampler.context_length)
            return Refused(
                400,
                f"the messages leave no room: this model's maximum context length is {most} tokens",
                "context_length_exceeded",
            )
        if over.stop_reason is StopReason.MAX_TURNS:
            return Refused(403, f"the episode's {self.loop.limits.max_turns} turns are used up", "max_turns")
        return Refused(503, f"the episode is over: {over.stop_reason}", "episode_over")

    def _note_branch(self, turn: int, match: Match[_ContinuableTurn], reason: BranchReason, found: str) -> None:
        self.counts[f"branches/{reason}"] += 1
        if len(self._branches) < _MOST_BRANCHES:
            after = None if match.known is None or match.known.turn is None else match.known.turn.thread.turn
            self._branches.append(
                {"turn": turn, "agent": match.agent, "reason": str(reason), "after": after, "found": found}
            )


def _with_prompt(thread: Thread, prompt_ids: Int32 | None) -> Thread:
    """Return a copy of the thread that holds these prompt ids as an array. If they are None, the copy holds no array;
    the recorder can rebuild it."""
    ids = np.empty(0, dtype=np.int32) if prompt_ids is None else prompt_ids
    return _changed(thread, answer={"prompt_ids": prompt_ids}, conversation={"prompt_ids": ids})


def _changed(thread: Thread, *, answer: Mapping[str, Any], conversation: Mapping[str, Any], **changes: Any) -> Thread:
    """Return a copy of the thread, with changes to its own fields, to the fields of its answer, and to the fields of
    the answer's conversation."""
    held = thread.answer.conversation
    if held is not None:
        held = dataclasses.replace(held, **conversation)
    return dataclasses.replace(
        thread, answer=dataclasses.replace(thread.answer, conversation=held, **answer), **changes
    )
