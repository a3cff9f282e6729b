"""One episode against a chat-completions server: whatever goes wrong stays on its trajectory, and is counted there."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from verbatim.errors import EnvironmentFault, RecordError, RolloutError, SamplerFault
from verbatim.inference.base import SamplingParams
from verbatim.inference.chat.answer import ChatAnswer
from verbatim.inference.chat.client import Connection
from verbatim.inference.chat.request import chat_body, samples_as_modelled
from verbatim.rollouts.agent_loop import EpisodeLimits
from verbatim.rollouts.base import Opening
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rewards import add_reward
from verbatim.rollouts.seeds import derive_seed
from verbatim.token_tree import LARGEST_ID
from verbatim.tools.manager import ToolManager, ToolOutcome
from verbatim.types import PARSE_STATUSES, Message, ParseStatus, StopReason, ToolCall, Trajectory, TurnTiming


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatRules:
    """What all episodes of one call share."""

    params: SamplingParams
    limits: EpisodeLimits
    """All but `max_context`, which is the server's own."""
    extra_body: Mapping[str, Any]
    """Goes into every request as it is."""
    send_reasoning: bool
    """Whether earlier thinking is sent back."""
    tool_error: Literal["message", "stop"]
    """What a tool that raises or hangs does: tells the model, or ends the episode."""
    seed: int | None
    """Each request gets one of its own, made from this; None sends none."""


class ChatEpisode:
    """Asks, runs the tools that were called, and asks again. What it holds can be looked at at any time.

    Args:
        connection: To the server.
        opening: Where it begins.
        tools: What the model is offered, and what runs it.
        rules: As for every episode.
    """

    def __init__(
        self, *, connection: Connection, opening: Opening, tools: ToolManager, rules: ChatRules
    ) -> None:
        self._connection = connection
        self._opening = opening
        self._tools = tools
        self._rules = rules
        self._messages: list[Message] = list(opening.messages)
        self._recorder = Recorder(LARGEST_ID + 1, trajectory_id=opening.identity.trajectory_id)
        self._asks_for_ids = bool(rules.extra_body.get("return_token_ids"))
        self._num_turns = 0
        self._num_calls = 0
        self._usage: Counter[str] = Counter()
        self._request_errors: Counter[str] = Counter()
        self._tool_errors: Counter[str] = Counter()
        self._timeline: list[dict[str, Any]] = []
        self._started = time.perf_counter()

    async def run(self) -> Trajectory:
        """Take it to its end.

        Raises:
            asyncio.CancelledError: it is being cancelled; `so_far` still gives what there is.
        """
        limits = self._rules.limits
        self._started = time.perf_counter()
        try:
            async with asyncio.timeout(limits.timeout):
                return self.so_far(await self._converse())
        except TimeoutError:
            error = f"timeout: the episode took more than {limits.timeout:g} s"
        except SamplerFault as fault:
            error = f"api: {fault}"
        except RolloutError as fault:
            error = f"{'record' if isinstance(fault, RecordError) else 'tool'}: {fault}"
        return self.so_far(StopReason.API_ERROR, error)

    def so_far(self, stop_reason: StopReason, error: str | None = None) -> Trajectory:
        """The record of what has happened."""
        turns = tuple(self._recorder.turns)
        info: dict[str, Any] = {"model": self._connection.api.model, "usage": dict(self._usage)}
        for name, found in (
            ("request_errors", dict(self._request_errors)), ("tool_errors", dict(self._tool_errors)),
            ("timeline", list(self._timeline)), ("task", self._opening.task),
        ):  # fmt: skip
            if found:
                info[name] = found
        identity = dataclasses.replace(self._opening.identity, seed=self._rules.seed)
        return Trajectory.of(
            identity, turns=turns, messages=tuple(self._messages), tools=self._opening.tools, stop_reason=stop_reason,
            truncated=stop_reason.truncated, error=error, info=info,
            num_unrecorded_turns=self._num_turns - len(turns),
            num_unrecorded_tokens=self._recorder.num_unrecorded_tokens,
        )  # fmt: skip

    async def _converse(self) -> StopReason:
        limits = self._rules.limits
        malformed_in_a_row = 0
        while True:
            answer, calls = await self._ask()
            if answer.stop_reason is not StopReason.STOP:
                return answer.stop_reason
            if not calls:
                return StopReason.STOP
            if self._num_turns >= limits.max_turns:
                return StopReason.MAX_TURNS  # the pending calls are not run
            done = await self._run_tools(calls)
            malformed_in_a_row = malformed_in_a_row + 1 if all(call.status != "ok" for call in calls) else 0
            if done:
                return StopReason.STOP
            if malformed_in_a_row > limits.max_malformed_retries:
                return StopReason.MALFORMED

    async def _ask(self) -> tuple[ChatAnswer, tuple[ToolCall, ...]]:
        """One request and its answer, taken into the conversation."""
        rules, identity = self._rules, self._opening.identity
        seed = None
        if rules.seed is not None:
            seed = derive_seed(rules.seed, identity.example_id, identity.sample_index, self._num_turns)
        body = chat_body(
            self._connection.api.model, self._messages, self._tools.schemas, rules.params, extra_body=rules.extra_body,
            seed=seed, send_reasoning=rules.send_reasoning,
        )  # fmt: skip
        entry = self._enter(what="generation")
        try:
            answer = await self._connection.complete(body, self._request_errors)
        finally:
            self._leave(entry)
        calls = tuple(self._identify(call) for call in answer.tool_calls)
        self._messages.append(_message(answer, calls))
        self._num_turns += 1
        self._usage.update(answer.usage)
        self._record(answer, calls, body, entry["seconds"])
        return answer, calls

    def _record(
        self, answer: ChatAnswer, calls: tuple[ToolCall, ...], body: Mapping[str, Any], seconds: float
    ) -> None:
        """The exact ids, where the server gives them: then of every turn, or the trajectory has a hole."""
        num_tokens = 0 if answer.completion_ids is None else len(answer.completion_ids)
        if answer.completion_ids is None or answer.prompt_ids is None:
            if self._asks_for_ids or self._recorder.turns:
                self._recorder.count(num_tokens)
                raise RecordError(
                    f"turn {self._num_turns - 1}: the answer has no "
                    f"{'prompt_token_ids' if answer.prompt_ids is None else 'token_ids'}; expected a server that knows "
                    "return_token_ids, such as vLLM, or leave it out of extra_body"
                )
            return
        self._recorder.count(num_tokens)
        if self._num_turns - 1 > len(self._recorder.turns):
            raise RecordError(f"turn {self._num_turns - 1}: the answer has token ids; no earlier one had")
        known = self._connection.api.processed_logprobs or samples_as_modelled(body)
        self._recorder.record(
            prompt_ids=answer.prompt_ids, completion_ids=answer.completion_ids,
            logprobs=answer.logprobs if known else None, policy_versions=answer.policy_versions,
            stop_reason=answer.stop_reason,
            temperature=body.get("temperature", 1.0), tool_calls=calls,
            parse_status=next((call.status for call in calls if call.status != "ok"), "ok"),
            timing=TurnTiming(generated=seconds),
        )  # fmt: skip

    async def _run_tools(self, calls: tuple[ToolCall, ...]) -> bool:
        """Answer the calls in order, until one of them ends the episode; whether one did."""
        limits = self._rules.limits
        outcomes: list[ToolOutcome] = []
        reward: float | None = None
        started = time.perf_counter()
        try:
            for call in calls:
                entry = self._enter(what="tool", name=call.name, id=call.id)
                try:
                    outcome = await self._tools.dispatch(
                        call, timeout=limits.tool_timeout, output_limit=limits.tool_output_limit
                    )
                finally:
                    self._leave(entry)
                outcomes.append(outcome)
                self._note(outcome, entry)
                reward = add_reward(reward, outcome.reward, f"tool {call.name}")
                if outcome.reward is not None:
                    entry["reward"] = float(outcome.reward)
                if outcome.done:
                    return True
        finally:
            self._amend(outcomes, reward, time.perf_counter() - started)
        return False

    def _note(self, outcome: ToolOutcome, entry: dict[str, Any]) -> None:
        kind = outcome.error_kind
        self._messages.append(outcome.message)
        if kind is None:
            return
        entry["error"] = kind
        self._tool_errors[kind] += 1
        if self._rules.tool_error == "stop" and kind in ("exception", "timeout"):
            raise EnvironmentFault(outcome.message["content"])

    def _amend(self, outcomes: list[ToolOutcome], reward: float | None, seconds: float) -> None:
        """Add to the recorded turn what its calls came to."""
        if not self._recorder.turns:
            return
        turn = self._recorder.turns[-1]
        assert turn.timing is not None
        kinds = [outcome.error_kind for outcome in outcomes if outcome.error_kind in PARSE_STATUSES]
        self._recorder.amend(
            len(self._recorder.turns) - 1,
            reward=reward,
            timing=TurnTiming(generated=turn.timing.generated, tools=seconds),
            parse_status=cast(ParseStatus, kinds[0]) if turn.parse_status == "ok" and kinds else turn.parse_status,
        )

    def _identify(self, call: ToolCall) -> ToolCall:
        self._num_calls += 1
        return call if call.id else dataclasses.replace(call, id=f"call_{self._num_calls - 1}")

    def _enter(self, **about: Any) -> dict[str, Any]:
        """Begin an entry of the timeline; seconds are counted from the start of the episode."""
        entry = {"turn": self._num_turns - (about["what"] == "tool"), **about}
        entry["start"] = time.perf_counter() - self._started
        self._timeline.append(entry)
        return entry

    def _leave(self, entry: dict[str, Any]) -> None:
        entry["seconds"] = time.perf_counter() - self._started - entry["start"]


def _message(answer: ChatAnswer, calls: tuple[ToolCall, ...]) -> Message:
    """The assistant's message, with every attempted call in the words of the model."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name or "unnamed", "arguments": call.raw}}
            for call in calls
        ]
    return message
