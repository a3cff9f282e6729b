"""Samples turns from a chat-completions server, which answers with text. Used by `APIMultiTurnRollout`, and for
teachers, whose turns are converted to the ids of the student that imitates them."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import ModelError, RecordError, UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Message, ParseStatus, ToolCall, Turn, TurnTiming
from verbatim.inference.chat.answer import ChatAnswer
from verbatim.inference.chat.client import ChatConnection
from verbatim.inference.chat.request import chat_body, samples_as_modelled
from verbatim.models.renderers.renderer import ParsedResponse, Renderer
from verbatim.rollouts.demonstrations import trajectory_from_messages
from verbatim.rollouts.loop import EpisodeLoop, Prompt, SampledAnswer, Thread
from verbatim.rollouts.recorder import Recorder


class ChatLoop(EpisodeLoop):
    """Answers prompts with a chat server. Turns are recorded only if the server returns their token ids (vLLM does with
    `extra_body={"return_token_ids": True}`); otherwise they are only counted.

    Args:
        connection: Connection to the server.
        params: Sampling parameters.
        limits: Limits of the episode.
        recorder: Records the turns.
        seed_of: Given the number of a request, returns the request's seed, or None to send no seed.
        extra_body: Keys that are merged into every request.
        send_reasoning: True to send the reasoning of earlier messages back to the server.
    """

    engine = "api"
    needs_content = False

    def __init__(
        self,
        *,
        connection: ChatConnection,
        params: SamplingParams,
        limits: EpisodeLimits,
        recorder: Recorder,
        seed_of: Callable[[int], int | None],
        extra_body: Mapping[str, Any] | None = None,
        send_reasoning: bool = False,
    ) -> None:
        super().__init__(limits=limits, recorder=recorder)
        self._connection, self._params, self._seed_of = connection, params, seed_of
        self._extra_body, self._send_reasoning = extra_body or {}, send_reasoning
        self._num_answers = 0
        self._usage: Counter[str] = Counter()
        self._request_errors: Counter[str] = Counter()

    @property
    def num_unrecorded_turns(self) -> int:
        """Number of answers that were not recorded as turns because the server returned no ids."""
        return self._num_answers - len(self.recorder.turns)

    @property
    def info(self) -> Mapping[str, Any]:
        """The model's name, the token counts that the server reports, and for each error the number of requests that
        were retried because of it."""
        errors = {"request_errors": dict(self._request_errors)} if self._request_errors else {}
        return {"model": self._connection.api.model, "usage": dict(self._usage), **errors}

    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        most = self._within_budget(self._params.max_tokens)
        seed = self._seed_of(self._begin_turn())
        body = chat_body(
            self._connection.api.model,
            prompt.messages,
            prompt.schemas,
            dataclasses.replace(self._params, max_tokens=most),
            extra_body=self._extra_body,
            seed=seed,
            send_reasoning=self._send_reasoning,
        )
        started = time.perf_counter()
        self._num_promised_tokens += most
        try:
            said = await self._connection.complete(body, self._request_errors)
        finally:
            self._num_promised_tokens -= most
        timing = TurnTiming(generated=time.perf_counter() - started)
        self._num_answers += 1
        self._usage.update(said.usage)
        counted = said.usage.get("completion_tokens", 0) if said.completion_ids is None else len(said.completion_ids)
        self._num_completion_tokens += counted
        calls = tuple(map(self._identify, said.tool_calls))
        # By default vLLM reports logprobs of the unmodified distribution. The logprobs are those of the sampled tokens
        # only if no parameter (top_p, penalties, ...) changes the distribution, or if the server reports processed
        # logprobs.
        known = self._connection.api.processed_logprobs or samples_as_modelled(body)
        return SampledAnswer(
            message=self._message(said, calls),
            tool_calls=calls,
            stop_reason=said.stop_reason,
            prompt_ids=said.prompt_ids,
            completion_ids=said.completion_ids,
            logprobs=said.logprobs if known else None,
            policy_versions=said.policy_versions,
            temperature=body.get("temperature", 1.0),
            timing=timing,
        )

    def _message(self, said: ChatAnswer, calls: tuple[ToolCall, ...]) -> Message:
        """Return the assistant's message. Malformed calls stay in the message as the model wrote them, so that the
        model sees its mistake."""
        message = ParsedResponse(content=said.content, reasoning_content=said.reasoning, tool_calls=calls).message()
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name or "unnamed", "arguments": call.raw}}
                for call in calls
            ]
        return message

    def _record(self, answer: SampledAnswer, prompt: Prompt, state_key: str | None) -> int:
        """Record the turn with the server's ids, and return its index. In one episode either all turns have ids or no
        turn has ids."""
        index = self._num_answers - 1
        if answer.completion_ids is not None:
            self.recorder.count(len(answer.completion_ids))
        if answer.completion_ids is None or answer.prompt_ids is None:
            if self._extra_body.get("return_token_ids") or self.recorder.turns:
                raise RecordError(
                    f"turn {index}: the answer has no "
                    f"{'prompt_token_ids' if answer.prompt_ids is None else 'token_ids'}; use a server "
                    "that supports return_token_ids, such as vLLM, or leave return_token_ids out of extra_body"
                )
            return index
        if index > len(self.recorder.turns):
            raise RecordError(f"turn {index}: the answer has token ids, but no earlier answer had any")
        return super()._record(answer, prompt, state_key)


class TeacherLoop(ChatLoop):
    """Answers prompts with a teacher, and records the turns with the ids of the student that imitates the teacher.

    The student's renderer produces the ids when the episode is over, because a template may render an answer
    differently once another message follows it. The teacher's logprobs are unknown.

    Args:
        renderer: The student's renderer.
        chat: Further arguments, as for `ChatLoop`.
    """

    engine = "sampler"
    needs_content = True

    def __init__(self, *, renderer: Renderer, **chat: Any) -> None:
        super().__init__(**chat)
        self._renderer = renderer
        self._held: list[dict[str, Any]] = []
        self._schemas: dict[str, Sequence[Mapping[str, Any]]] = {}

    def amend_last_turn(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus = "ok") -> None:
        """Add to the last turn, which is held back for `finish`, the values that were not known when it was sampled."""
        held = self._held[-1]
        held["reward"], held["timing"] = reward, dataclasses.replace(held["timing"], tools=tool_seconds)
        held["parse_status"] = held["parse_status"] if held["parse_status"] != "ok" else parse_status

    def finish(self) -> None:
        """Record every turn with the student's ids, in the order of sampling. Raises RecordError if the student's
        template cannot render a turn."""
        written: dict[str, list[Turn]] = {}
        for agent, thread in self._threads.items():
            num_said = sum(held["agent"] == agent for held in self._held)
            try:
                turns = trajectory_from_messages(self._renderer, thread.messages, self._schemas[agent] or None).turns
            except ModelError:
                raise
            except UsageError as error:
                raise RecordError(f"agent {agent}: {error}") from error
            written[agent] = list(turns[-num_said:])  # earlier assistant messages came with the prompt
        for held in self._held:
            turn = written[held["agent"]].pop(0)
            self.recorder.count(len(turn.completion_ids))
            self.recorder.record(prompt_ids=turn.prompt_ids, completion_ids=turn.completion_ids, **held)

    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        thread = prompt.thread
        if thread is None:
            self._schemas[prompt.agent] = copy.deepcopy(prompt.schemas)
        elif not prompt.num_known or thread.tools != prompt.tools:
            raise _other_history(prompt, thread)
        return await super()._answer(prompt)

    def _message(self, said: ChatAnswer, calls: tuple[ToolCall, ...]) -> Message:
        """Return the assistant's message without malformed calls, because a student must not imitate them."""
        return ParsedResponse(content=said.content, reasoning_content=said.reasoning, tool_calls=calls).message()

    def _record(self, answer: SampledAnswer, prompt: Prompt, state_key: str | None) -> int:
        """Hold the turn back until `finish`, and return its index."""
        thread = self._threads.get(prompt.agent)
        if thread is not None and thread is not prompt.thread:  # another turn of the agent has ended in the meantime
            raise _other_history(prompt, thread)
        self._held.append(answer.turn_fields(prompt, state_key))
        return len(self._held) - 1


def _other_history(prompt: Prompt, thread: Thread) -> RecordError:
    return RecordError(
        f"agent {prompt.agent}: its history or its tools have changed since turn {thread.turn}; a teacher needs one "
        "unchanged conversation for each agent, so use another agent name for another history"
    )
