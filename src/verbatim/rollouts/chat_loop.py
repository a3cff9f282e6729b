"""Runs turns over a chat-completions server, which answers with text: for teachers and `APIMultiTurnRollout`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.errors import RecordError
from verbatim.inference.base import SamplingParams
from verbatim.inference.chat.answer import ChatAnswer
from verbatim.inference.chat.client import Connection
from verbatim.inference.chat.request import chat_body, samples_as_modelled
from verbatim.renderers.base import ParsedResponse
from verbatim.rollouts.loop import Answer, EpisodeLimits, EpisodeLoop, Prompt
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.student_turns import StudentTurns
from verbatim.types import Message, ParseStatus, ToolCall, TurnTiming


class ChatLoop(EpisodeLoop):
    """Answers prompts with a chat server.

    Turns are recorded in the ids that the server tells (`extra_body={"return_token_ids": True}`), or in those of a
    student that imitates the server's texts, or not at all; then they are counted.

    Args:
        connection: To the server.
        params: How it samples.
        limits: Where the episode is cut off.
        recorder: Gets the turns.
        seed_of: The seed of the request with this number; None sends none.
        student: Records the turns in a student's ids; None = in the server's.
        extra_body: Goes into every request as it is.
        send_reasoning: Whether earlier thinking is sent back.
    """

    def __init__(
        self,
        *,
        connection: Connection,
        params: SamplingParams,
        limits: EpisodeLimits,
        recorder: Recorder,
        seed_of: Callable[[int], int | None],
        student: StudentTurns | None = None,
        extra_body: Mapping[str, Any] | None = None,
        send_reasoning: bool = False,
    ) -> None:
        super().__init__(limits=limits, recorder=recorder)
        self.engine = "api" if student is None else "sampler"
        self.needs_content = student is not None
        self._connection = connection
        self._params = params
        self._seed_of = seed_of
        self._student = student
        self._extra_body = extra_body or {}
        self._send_reasoning = send_reasoning
        self._num_answers = 0
        self._usage: Counter[str] = Counter()
        self._request_errors: Counter[str] = Counter()

    @property
    def num_unrecorded_turns(self) -> int:
        """Answers that are in no recorded turn."""
        return self._num_answers - len(self.recorder.turns)

    @property
    def info(self) -> Mapping[str, Any]:
        """The model, the server's own token counts, and the failed requests that were made again."""
        errors = {"request_errors": dict(self._request_errors)} if self._request_errors else {}
        return {"model": self._connection.api.model, "usage": dict(self._usage), **errors}

    def amend_last_turn(self, *, reward: float | None, tool_seconds: float, parse_status: ParseStatus = "ok") -> None:
        """Add what became known after the answer: its reward, the seconds that its tools took, and whether its calls
        fitted a tool."""
        if self._student is not None:
            self._student.amend_last(reward=reward, tool_seconds=tool_seconds, parse_status=parse_status)
        else:
            super().amend_last_turn(reward=reward, tool_seconds=tool_seconds, parse_status=parse_status)

    def finish(self) -> None:
        """Record the turns in the student's ids, where there is a student.

        Raises:
            RecordError: the student's template cannot write what was said.
        """
        if self._student is not None:
            self._student.record(self.recorder, {agent: thread.messages for agent, thread in self._threads.items()})

    async def _answer(self, prompt: Prompt) -> Answer:
        if self._student is not None:
            self._student.begin(prompt)
        seed = self._seed_of(self._begin_turn())
        body = chat_body(
            self._connection.api.model, prompt.messages, prompt.schemas, self._params, extra_body=self._extra_body,
            seed=seed, send_reasoning=self._send_reasoning,
        )  # fmt: skip
        started = time.perf_counter()
        said = await self._connection.complete(body, self._request_errors)
        timing = TurnTiming(generated=time.perf_counter() - started)
        self._num_answers += 1
        self._usage.update(said.usage)
        calls = tuple(map(self._identify, said.tool_calls))
        known = self._connection.api.processed_logprobs or samples_as_modelled(body)
        return Answer(
            message=self._message(said, calls), tool_calls=calls, stop_reason=said.stop_reason,
            prompt_ids=said.prompt_ids, completion_ids=said.completion_ids, logprobs=said.logprobs if known else None,
            policy_versions=said.policy_versions, temperature=body.get("temperature", 1.0), timing=timing,
        )  # fmt: skip

    def _message(self, said: ChatAnswer, calls: tuple[ToolCall, ...]) -> Message:
        """The assistant's message. A student imitates well-formed calls only; else every attempted call is in it, in
        the words of the model."""
        parsed = ParsedResponse(content=said.content, reasoning_content=said.reasoning, tool_calls=calls)
        message = parsed.message()
        if calls and self._student is None:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name or "unnamed", "arguments": call.raw}}
                for call in calls
            ]
        return message

    def _record(self, answer: Answer, prompt: Prompt, state_key: str | None) -> int:
        """Write the turn down in the ids that the server told, of every turn or of none; its index."""
        index = self._num_answers - 1
        if self._student is not None:
            return self._student.hold(answer, prompt, self._threads.get(prompt.agent), state_key)
        if answer.completion_ids is not None:
            self.recorder.count(len(answer.completion_ids))
        if answer.completion_ids is None or answer.prompt_ids is None:
            if self._extra_body.get("return_token_ids") or self.recorder.turns:
                raise RecordError(
                    f"turn {index}: the answer has no "
                    f"{'prompt_token_ids' if answer.prompt_ids is None else 'token_ids'}; expected a server that knows "
                    "return_token_ids, such as vLLM, or leave it out of extra_body"
                )
            return index
        if index > len(self.recorder.turns):
            raise RecordError(f"turn {index}: the answer has token ids; no earlier one had")
        return super()._record(answer, prompt, state_key)
