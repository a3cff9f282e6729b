"""The rule by which prompts continue: sampled tokens stay exactly as they were sampled.

Let P be the ids of a prompt, C the ids sampled after it, N the messages to append, and B the ids that the format writes
after an assistant's turn: the rest of the turn's close, N, and the next generation prompt. The next prompt is P + C +
B. The sampler sees these ids, and the trainer trains on them. It does not matter whether the format itself would have
written the turn differently (an empty thinking block, white space, the spelling of JSON, a malformed call).

In the following cases the prompt is rendered from its messages instead, and the reason is counted:

(a) C contains, before its end, a control token that opens or closes a turn (`control_token`);
(b) C ended with a token that the format does not write between this turn and N (`other_end`): `<|user|>` before a
    tool's answer, `<|endoftext|>` where the format writes `<|im_end|>`, or an id that only generation_config.json has
    (`stop_ids`). This does not apply to a turn that was cut off, which gets the format's close;
(c) C ended inside a thought without being cut off (`open_thought`);
(d) the tools differ from the tools of P (`tools_changed`); (e) N contains messages that are neither a tool's nor a
user's, after folding by `message_support` (`other_messages`); (f) N contains a user's message, at which the format
drops thoughts, and P or C contains a non-empty thought
    (`thought_dropped`). This does not apply with `thinking_retention = "all"`;
(g) it is not known what the format writes (`format_unknown`).

Example, ChatML, P = `<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`, C = `yo<|im_end|>`, N = [user "so?"]:
after a turn the format writes `<|im_end|>\
<|im_start|>user\
so?<|im_end|>\
<|im_start|>assistant\
`. C already has the first of these tokens; the remaining tokens are B.
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
"""Number of prompts remembered by their ids, for callers that continue without a handle (`bridge_to_next_turn`)."""
_BYTES_OF_AN_ID = 16
"""Estimated memory of a remembered prompt, in bytes per id: the id itself, and its share of the messages and
schemas."""
_THOUGHT = "zqthought"
_THOUGHT_TAGS = ("<think>", "</think>")


class ContinuingRenderer(abc.ABC):
    """Base class of our renderers, which applies the rule above. Subclasses implement the formats."""

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
        """What happens to earlier thoughts when a new user message follows."""
        self.history: History = history
        """"verbatim" if prompts continue the sampled tokens, "template" if they are rendered from their messages every
        time."""
        self.later_system: LaterSystem = later_system
        """What happens to system and developer messages that the format does not write: they are folded or refused."""
        self._prompts: BoundedCache[bytes, Conversation] = BoundedCache(_KNOWN_PROMPTS, MOST_BYTES)

    def render_ids(
        self, messages: Sequence[Message], tools: Schemas = None, add_generation_prompt: bool = True
    ) -> Int32:
        """The ids of a whole conversation: int32 [L]. The array is read-only if conversations share it.

        Raises:
            EnvironmentFault: the messages are invalid, the format refuses them (two user turns in a row, two calls in
                one turn) or would leave out a field, or a tool could not be called. The text names the fault.
            TemplateFault: the rendering exceeds its budget.
            ModelError: the format would leave out the tools, a call, or a tool's answer.
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
        """The ids of a conversation, without the checks of `render_ids`: the format may leave out a part of it."""

    @abc.abstractmethod
    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Parse a completion."""

    @abc.abstractmethod
    def _behind(self, conversation: Conversation, body: Int32, new_messages: Sequence[Message]) -> list[int] | None:
        """The ids that the format writes after the sampled turn, or None if they are not known.

        They start with the turn's close (in a format without a close, with the opening of the next message), followed
        by the new messages and the generation prompt. `body` is the completion without the token that ended it.
        """

    def decode(self, ids: Int32 | Sequence[int]) -> str:
        """The text of ids for display, special tokens included."""
        return self.tokenizer.decode(ids)

    def written(self, messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
        """The text of `write_ids`."""
        return self.decode(self.write_ids(messages, tools, add_generation_prompt))

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Which tool features the format can write: schemas, calls, and tools' answers."""
        return COMPLETE

    @cached_property
    def message_support(self) -> MessageSupport:
        """Which messages the format writes, and how to fold the others."""
        return MessageSupport(self.written, self._who, self.later_system)

    @cached_property
    def callable_tools(self) -> CallableTools:
        """Which tool names the format can write and read back."""
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
        """The ids of the next prompt: the previous turn's ids verbatim, the new messages and the generation prompt;
        None if the sampled tokens cannot be continued.

        This is for callers without a `Conversation`. The prompt is looked up by its ids among this renderer's last
        prompts.
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
        """The ids of the next prompt, or the reason why the next prompt cannot continue the sampled tokens.

        Raises:
            EnvironmentFault: the new messages are invalid, or the format leaves one of them out.
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
        # B has to begin with a control token, because any other token could merge with the sampled ids before it.
        if not behind or behind[0] not in self._control_ids:
            return BreakReason.FORMAT_UNKNOWN
        if ended and behind[0] != completion[-1]:
            return BreakReason.OPEN_THOUGHT if behind[0] in self._thought_ids else BreakReason.OTHER_END
        added = np.asarray(behind[1:] if ended else behind, dtype=np.int32)
        return np.concatenate([conversation.prompt_ids, completion, added], dtype=np.int32)

    def holds_thoughts(self, messages: Sequence[Message]) -> bool:
        """True if the rendering of these messages contains a non-empty thought after the last user message."""
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
        """Reasons (a), (c), (d), (e) and (f), which need no rendering and are therefore checked first."""
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
        """The control tokens that end turns, as text.

        generation_config.json may also list plain-text tokens. Such tokens end sampled turns, but are ordinary words in
        rendered text, so they are left out here.
        """
        return [self.decode([i]) for i in self.stop_token_ids if i in self._control_ids]

    def _holds_turn_token(self, body: list[int]) -> bool:
        """True if a turn contains a control token that opens or closes a turn."""
        return not self.turn_token_ids.isdisjoint(body)

    @cached_property
    def turn_token_ids(self) -> frozenset[int]:
        """The control tokens that open or close a turn, found by rendering.

        These are the tokens that end a turn, and the tokens that the format writes before the text of system, user and
        tool messages. Tokens of a plain answer are excluded, because they are legitimate inside a turn.
        """
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
        """The control tokens that the format writes inside a plain answer, before its end."""
        prompt, whole = self._written([ASK], True), self._written([ASK, ANSWER], False)
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
        return self._controls_of(answer[: self._end_of_turn(answer)])

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        """The index of the token that ends the turn, or the number of ids if no token ends the turn."""
        return next((place for place, token in enumerate(ids) if token in self.stop_token_ids), len(ids))

    @cached_property
    def drops_thoughts(self) -> bool:
        """True if the format drops the thoughts of earlier turns when a new user message follows."""
        return not self._holds_thought([ASK, _thoughtful(ANSWER), ASK])

    @cached_property
    def _writes_thoughts(self) -> bool:
        """True if the format keeps the thoughts of turns after the last user message."""
        return self._holds_thought([ASK, _thoughtful(calling()), RESULT]) or self._holds_thought(
            [ASK, _thoughtful(ANSWER)]
        )

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.control_tokens.values())

    def _holds_thought(self, messages: Sequence[Any]) -> bool:
        return _THOUGHT in self.decode(self._written(messages, messages[-1]["role"] != "assistant"))

    def _written(self, messages: Sequence[Any], prompt: bool) -> list[int]:
        """The ids of probe messages; empty if the format refuses them."""
        try:
            ids: list[int] = self.write_ids(messages, None, prompt).tolist()
        except EnvironmentFault:
            return []
        return ids

    def _probed_behind(self, calls: Sequence[ToolCall], new: Sequence[Any]) -> list[int]:
        """The ids that the format writes after a turn that answers one question with these calls; empty if unknown."""
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
        """The control tokens among the ids, except tokens that open or close a thought."""
        return [i for i in ids if i in self._control_ids and i not in self._thought_ids]

    def _note(self, ids: Int32, messages: Sequence[Message], tools: Schemas) -> None:
        """Remember a prompt for `bridge_to_next_turn`. The messages are copied, because their owner may change them."""
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
