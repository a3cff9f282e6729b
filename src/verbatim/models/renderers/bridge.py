"""The rule by which prompts continue: what was sampled stays as it was sampled.

P are the ids of a prompt, C the ids that were sampled after it, N the messages to append, and B what the format
writes behind the end of an assistant's turn: the rest of its close, N, the next generation prompt. The next prompt is
P + C + B. The sampler sees it, and the trainer trains it, so nothing else is asked for: that the format would write the
turn itself in another way (an empty thinking block, white space, the spelling of JSON, a call that cannot be read) does
not matter.

The prompt is rendered anew, and the reason counted, if

(a) C holds, before its end, a control token that opens or closes a turn (`control_token`);
(b) C ended with a token that the format does not write between this turn and N (`other_end`): `<|user|>` before a
    tool's answer, `<|endoftext|>` where it writes `<|im_end|>`, an id that only generation_config.json
    has (`stop_ids`). A turn that was cut off gets the format's close;
(c) a thought is open where C ended by itself (`open_thought`);
(d) the tools are others than those of P (`tools_changed`);
(e) N holds messages that are not of tools or users, once folded by `message_support` (`other_messages`);
(f) N holds a user's message, at which the format drops thoughts, and P or C holds one that is not empty; not with
    `thinking_retention = "all"` (`thought_dropped`);
(g) it is not known what the format writes (`format_unknown`).

Example, ChatML, P = `<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`, C = `yo<|im_end|>`, N = [user "so?"]:
behind a turn the format writes `<|im_end|>\\n<|im_start|>user\\nso?<|im_end|>\\n<|im_start|>assistant\\n`. C has the
first token of it; the others are B.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import Int32, Message, ToolCall
from verbatim.models.renderers.bounded_cache import MOST_BYTES, BoundedCache
from verbatim.models.renderers.callable_tools import CallableTools
from verbatim.models.renderers.conversation import (
    BreakReason,
    Conversation,
    History,
    SampledReply,
    ThinkingRetention,
    same_tools,
)
from verbatim.models.renderers.message_support import LaterSystem, MessageSupport
from verbatim.models.renderers.messages import check_messages
from verbatim.models.renderers.probe_messages import ANSWER, ASK, NAME, RESULT, SYSTEM, calling
from verbatim.models.renderers.renderer import ParsedResponse, Schemas
from verbatim.models.renderers.sampled_text import SampledText
from verbatim.models.renderers.special_token_escaping import EscapingTokenizer
from verbatim.models.renderers.tool_support import COMPLETE, ToolSupport

_CONTINUED_ROLES = frozenset({"tool", "user"})
_KNOWN_PROMPTS = 1024
"""Prompts that are continued by their ids alone, without a handle."""
_BYTES_OF_AN_ID = 16
"""Memory of a remembered prompt for each of its ids: the id, and the text and the schemas that it was made from."""
_THOUGHT = "zqthought"
_THOUGHT_TAGS = ("<think>", "</think>")


class ContinuingRenderer(abc.ABC):
    """What all our renderers have in common: the rule. A subclass knows a format."""

    stop_token_ids: tuple[int, ...]

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        *,
        thinking_retention: ThinkingRetention = "tool_cycle",
        history: History = "verbatim",
        later_system: LaterSystem = "fold",
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer if isinstance(tokenizer, EscapingTokenizer) else EscapingTokenizer(tokenizer)
        self._sampled = SampledText(self.tokenizer)
        self.thinking_retention: ThinkingRetention = thinking_retention
        """At a user's message: whether thoughts go where the format drops them, or stay."""
        self.history: History = history
        """Whether prompts continue what was sampled."""
        self.later_system: LaterSystem = later_system
        """What becomes of system and developer messages that the format does not write."""
        self._prompts: BoundedCache[bytes, Conversation] = BoundedCache(_KNOWN_PROMPTS, MOST_BYTES)

    def render_ids(
        self, messages: Sequence[Message], tools: Schemas = None, add_generation_prompt: bool = True
    ) -> Int32:
        """The ids of a whole conversation: int32 [L]; read-only where several conversations share them.

        Raises:
            EnvironmentFault: invalid messages; or the format refuses them (two user turns in a row, two calls at once),
                or leaves out a part of them, and the field is named; or a tool that could not be called.
            TemplateFault: the rendering exceeds its budget.
            ModelError: the format would leave out the tools, a call, or what a tool answered.
        """
        check_messages(messages)
        given = self.message_support.folded(messages, tools)
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in given.messages):
            self.tool_support.refuse(given.messages, tools, self._who)
        self.callable_tools.refuse(tools)
        self.message_support.check(given, tools, add_generation_prompt)
        try:
            ids = self.write_ids(given.messages, tools, add_generation_prompt)
        except EnvironmentFault as fault:
            raise self.message_support.naming(fault, given, tools, add_generation_prompt) from fault
        if add_generation_prompt:
            self._note(ids, messages, tools)
        return ids

    @abc.abstractmethod
    def write_ids(self, messages: Sequence[Message], tools: Schemas, add_generation_prompt: bool) -> Int32:
        """The ids of a conversation, even if the format leaves out a part of it."""

    @abc.abstractmethod
    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Read a completion."""

    @abc.abstractmethod
    def _behind(self, conversation: Conversation, body: Int32, new_messages: Sequence[Message]) -> list[int] | None:
        """What the format writes behind the turn: its close or, in a format without one, what opens the next message;
        then the new messages and the generation prompt. None where that is not known.

        `body` is the completion without the token that ended it.
        """

    def decode(self, ids: Int32 | Sequence[int]) -> str:
        """Text for people, special tokens included."""
        return self.tokenizer.decode(ids)

    def written(self, messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        """The text of `write_ids`."""
        return self.decode(self.write_ids(messages, tools, add_generation_prompt))

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Which parts of tools the format writes."""
        return COMPLETE

    @cached_property
    def message_support(self) -> MessageSupport:
        """Which messages the format writes, and how the others are folded."""
        return MessageSupport(self.written, self._who, self.later_system)

    @cached_property
    def callable_tools(self) -> CallableTools:
        """Which names of tools the format takes."""
        return CallableTools(
            lambda messages, prompt: self.write_ids(messages, None, prompt),
            lambda completion, prompt: self.parse_response(completion, prompt).tool_calls,
            self._who,
        )

    @property
    def _who(self) -> str:
        return "the model's chat template" if self.name == "template" else f'renderer "{self.name}"'

    def bridge_to_next_turn(
        self, prev_prompt_ids: Int32, prev_completion_ids: Int32, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | None:
        """The previous turn's ids verbatim, plus the new messages and the generation prompt; or None.

        For callers without a handle: the prompt is known by its ids, if it is among the last that were made here.
        """
        known = self._prompts.get(_key(prev_prompt_ids))
        if known is None or not new_messages:
            return None
        following = known.answered(prev_completion_ids).bridged(new_messages, tools)
        if isinstance(following, BreakReason):
            return None
        self._remember(following)
        return following.prompt_ids

    def continue_conversation(
        self, conversation: Conversation, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | BreakReason:
        """The next prompt, or why it has to be rendered anew.

        Raises:
            EnvironmentFault: invalid new messages, or one that the format leaves out.
            TemplateFault: a rendering exceeds its budget.
        """
        check_messages(new_messages)
        if self.history == "template":
            return BreakReason.HISTORY_TEMPLATE
        said = conversation.said
        assert said is not None
        completion = said.completion_ids
        ended = len(completion) > 0 and int(completion[-1]) in self.stop_token_ids
        body = completion[:-1] if ended else completion
        before = self.message_support.folded(conversation.messages, conversation.tools).messages
        if before is not conversation.messages:
            conversation = dataclasses.replace(conversation, messages=tuple(before))
        new_messages = self.message_support.appended(before, said.message, new_messages, tools)
        reason = self._reason_before(conversation, said, body, ended, new_messages, tools)
        if reason is not None:
            return reason
        behind = self._behind(conversation, body, new_messages)
        if not behind or behind[0] not in self._control_ids:
            return BreakReason.FORMAT_UNKNOWN
        if ended and behind[0] != completion[-1]:
            return BreakReason.OPEN_THOUGHT if behind[0] in self._thought_ids else BreakReason.OTHER_END
        added = np.asarray(behind[1:] if ended else behind, dtype=np.int32)
        return np.concatenate([conversation.prompt_ids, completion, added], dtype=np.int32)

    def holds_thoughts(self, messages: Sequence[Message]) -> bool:
        """Whether the rendering of these messages holds a thought that is not empty, behind the last user's message."""
        behind_user: list[Message] = []
        for message in messages:
            behind_user = [] if message.get("role") == "user" else [*behind_user, message]
        thinks = any(str(message.get("reasoning_content") or "").strip() for message in behind_user)
        return thinks and self._writes_thoughts

    def _reason_before(
        self,
        conversation: Conversation,
        said: SampledReply,
        body: Int32,
        ended: bool,
        new: Sequence[Message],
        tools: Schemas,
    ) -> BreakReason | None:
        """(a), (c), (d), (e) and (f): what is known before anything is rendered."""
        if not same_tools(conversation.tools, tools):
            return BreakReason.TOOLS_CHANGED
        if not new or any(message.get("role") not in _CONTINUED_ROLES for message in new):
            return BreakReason.OTHER_MESSAGES
        if self._holds_turn_token(body.tolist()):
            return BreakReason.CONTROL_TOKEN
        if ended and said.parsed.thought_open:
            return BreakReason.OPEN_THOUGHT
        drops = self.thinking_retention == "tool_cycle" and any(message["role"] == "user" for message in new)
        if drops and (conversation.thinks or said.thinks) and self.drops_thoughts:
            return BreakReason.THOUGHT_DROPPED
        return None

    @property
    def end_texts(self) -> list[str]:
        """The texts of the control tokens that end turns. A generation_config.json may list tokens of plain text too: a
        turn that was sampled ends with one, and in what the format writes they say nothing."""
        return [self.decode([i]) for i in self.stop_token_ids if i in self._control_ids]

    def _holds_turn_token(self, body: list[int]) -> bool:
        """Whether a turn holds a control token that opens or closes one."""
        return not self.turn_token_ids.isdisjoint(body)

    @cached_property
    def turn_token_ids(self) -> frozenset[int]:
        """The control tokens that open or close a turn: those that end one, and those that the format writes around
        the texts of systems, users and tools, as far as they stand before the text; without those of a plain answer."""
        found = set(self.stop_token_ids)
        for messages in ([ASK], [SYSTEM, ASK]):
            found |= set(self._controls_of(self._written(messages, True)))
        answered = self._probed_behind([], [ASK])
        found |= set(self._controls_of(answered))
        called = self._controls_of(self._probed_behind([_CALL], [RESULT]))
        is_close = called[:1] == self._controls_of(answered)[:1]
        found |= set(called[: 2 if is_close else 1])
        return frozenset(found).difference(self._answer_token_ids())

    def _answer_token_ids(self) -> list[int]:
        """The control tokens that the format writes in a plain answer, before its end."""
        prompt, whole = self._written([ASK], True), self._written([ASK, ANSWER], False)
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
        return self._controls_of(answer[: self._end_of_turn(answer)])

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        """The place of the token that ends a turn; the number of ids where none does."""
        return next((place for place, token in enumerate(ids) if token in self.stop_token_ids), len(ids))

    @cached_property
    def drops_thoughts(self) -> bool:
        """Whether the format drops the thoughts of earlier turns when the user speaks."""
        return not self._holds_thought([ASK, _thoughtful(ANSWER), ASK])

    @cached_property
    def _writes_thoughts(self) -> bool:
        """Whether the format writes the thoughts of turns that no user has answered yet."""
        return self._holds_thought([ASK, _thoughtful(calling()), RESULT]) or self._holds_thought(
            [ASK, _thoughtful(ANSWER)]
        )

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.control_tokens.values())

    def _holds_thought(self, messages: Sequence[Any]) -> bool:
        return _THOUGHT in self.decode(self._written(messages, messages[-1]["role"] != "assistant"))

    def _written(self, messages: Sequence[Any], prompt: bool) -> list[int]:
        """The ids of probe messages; none where the format refuses them."""
        try:
            ids: list[int] = self.write_ids(messages, None, prompt).tolist()
        except EnvironmentFault:
            return []
        return ids

    def _probed_behind(self, calls: Sequence[ToolCall], new: Sequence[Any]) -> list[int]:
        """What the format writes behind a turn with these calls, after one question; nothing where it is not known."""
        prompt = np.asarray(self._written([ASK], True), dtype=np.int32)
        nothing = np.empty(0, dtype=np.int32)
        said = SampledReply(
            completion_ids=nothing,
            message={"role": "assistant", "content": ""},
            calls=tuple(calls),
            parsed=ParsedResponse(content=""),
        )
        conversation = Conversation(renderer=self, messages=(ASK,), tools=None, prompt_ids=prompt, said=said)  # type: ignore[arg-type]
        try:
            return self._behind(conversation, nothing, new) or []
        except EnvironmentFault:
            return []

    @cached_property
    def _thought_ids(self) -> frozenset[int]:
        """The control tokens that open and close a thought."""
        return frozenset(
            self.tokenizer.control_tokens[tag] for tag in _THOUGHT_TAGS if tag in self.tokenizer.control_tokens
        )

    def _controls_of(self, ids: Sequence[int]) -> list[int]:
        """The control tokens in ids, those of thoughts left out."""
        return [i for i in ids if i in self._control_ids and i not in self._thought_ids]

    def _note(self, ids: Int32, messages: Sequence[Message], tools: Schemas) -> None:
        """Remember a prompt for `bridge_to_next_turn`. The messages are copied: their owner may change them."""
        copied = tuple(dict(message) for message in messages)
        self._remember(
            Conversation(
                renderer=self,
                messages=copied,  # type: ignore[arg-type]
                tools=tools,
                prompt_ids=ids,
                thinks=self.holds_thoughts(messages),
            )
        )

    def _remember(self, conversation: Conversation) -> None:
        ids = conversation.prompt_ids
        self._prompts.add(_key(ids), conversation, _BYTES_OF_AN_ID * len(ids))


_CALL = ToolCall(name=NAME, arguments={}, status="ok", raw="", id=RESULT["tool_call_id"])


def _thoughtful(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": _THOUGHT}


def _key(ids: Int32) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int32).data, digest_size=16).digest()
