"""Defines conversations. A conversation holds a prompt that a renderer can continue: messages, tools, ids, parsed
reply.

    conversation = Conversation.open(renderer, messages, tools)         # P: rendered
    conversation = conversation.answered(completion_ids, parsed)        # C: sampled and parsed
    conversation = conversation.continued(new_messages)                 # P + C + B, or rendered again, with the reason

An episode or a gateway session owns the conversation. A conversation is immutable, so several requests may continue the
same conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, Self, TypeGuard

import numpy as np

from verbatim.core.types import Int32, Message, ToolCall
from verbatim.models.renderers.renderer import ParsedResponse, Renderer, Schemas

ThinkingRetention = Literal["tool_cycle", "all"]
"""What happens to earlier thoughts when a new user message follows. With "tool_cycle", they are dropped if the format
drops them there. With "all", they are kept."""
History = Literal["verbatim", "template"]
"""With "verbatim", prompts continue the sampled tokens. With "template", they are rendered from their messages every
time, as a chat endpoint does."""


class BreakReason(StrEnum):
    """Why a prompt does not continue the previous turn. The values do not change between versions.

    `control_token` to `format_unknown` are (a) to (g) of the rule in `bridge`.
    """

    CONTROL_TOKEN = "control_token"
    """The completion contains, before its end, a control token that opens or closes a turn."""
    OTHER_END = "other_end"
    """The completion ended with a token that the format does not write between this turn and the new messages."""
    OPEN_THOUGHT = "open_thought"
    """The completion ended inside a thought."""
    TOOLS_CHANGED = "tools_changed"
    """The tools differ from the tools in the prompt."""
    OTHER_MESSAGES = "other_messages"
    """One of the new messages comes neither from a tool nor from a user."""
    THOUGHT_DROPPED = "thought_dropped"
    """A user's message follows, and the format then drops a thought that was sampled earlier."""
    FORMAT_UNKNOWN = "format_unknown"
    """It is not known what the format writes after this turn."""
    HISTORY_TEMPLATE = "history_template"
    """Because of `history = "template"`, every prompt is rendered from its messages."""
    HISTORY_EDITED = "history_edited"
    """Earlier messages were changed."""

    @property
    def sentence(self) -> str:
        """The reason in words, for messages."""
        return _SENTENCES[self]

    @property
    def advice(self) -> str:
        """What to change to get fewer of these breaks."""
        return _ADVICE[self]


_SENTENCES: Mapping[BreakReason, str] = {
    BreakReason.CONTROL_TOKEN: "the model sampled a token that opens or closes a turn inside its own turn",
    BreakReason.OTHER_END: "the model ended its turn with a token that the format does not write there",
    BreakReason.OPEN_THOUGHT: "the model ended its turn inside a thought",
    BreakReason.TOOLS_CHANGED: "the environment's tools differ from those shown before",
    BreakReason.OTHER_MESSAGES: "the environment appended a message that is neither a tool's nor a user's",
    BreakReason.THOUGHT_DROPPED: "the format drops earlier thoughts at a user's message; "
    'orchestrator.renderer.thinking_retention = "all" keeps them',
    BreakReason.FORMAT_UNKNOWN: "it is not known what the format writes after this turn",
    BreakReason.HISTORY_TEMPLATE: 'history = "template" renders every prompt; orchestrator.renderer.history = '
    '"verbatim" continues the sampled tokens',
    BreakReason.HISTORY_EDITED: "the environment changed messages that were already sent",
}

_MORE_WARM_START = "a policy that has learned the format rarely samples such turns: raise warm_start.steps"
_ADVICE: Mapping[BreakReason, str] = {
    BreakReason.CONTROL_TOKEN: _MORE_WARM_START,
    BreakReason.OTHER_END: _MORE_WARM_START,
    BreakReason.OPEN_THOUGHT: _MORE_WARM_START,
    BreakReason.TOOLS_CHANGED: "show the same tools throughout an episode; have the environment refuse calls instead",
    BreakReason.OTHER_MESSAGES: "have the environment send it as a user's message, or in a tool's answer",
    BreakReason.THOUGHT_DROPPED: 'orchestrator.renderer.thinking_retention = "all" keeps the thoughts',
    BreakReason.FORMAT_UNKNOWN: "`verbatim doctor --template MODEL` shows where your own template rewrites "
    'turns; for a known model, orchestrator.renderer.name = "auto" selects its family',
    BreakReason.HISTORY_TEMPLATE: 'orchestrator.renderer.history = "verbatim" continues the sampled tokens',
    BreakReason.HISTORY_EDITED: "have the environment leave earlier messages unchanged, and put changes into the "
    "newest one; if it shortens them on purpose, set monitor.alarms.prompt_breaks = false",
}


class ContinuesConversations(Protocol):
    """A renderer that continues conversations, and reports the reason if it cannot.

    Renderers without these methods continue prompts with `bridge_to_next_turn`.
    """

    def continue_conversation(
        self, conversation: Conversation, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | BreakReason:
        """The ids of the next prompt, or the reason why the next prompt cannot continue the sampled tokens."""

    def holds_thoughts(self, messages: Sequence[Message]) -> bool:
        """True if the rendering of these messages contains a non-empty thought after the last user message."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledReply:
    """A sampled turn and its parse."""

    completion_ids: Int32
    """The ids as sampled, including the token that ended the turn: int32 [C]."""
    message: Message
    """The assistant message that represents the turn in later prompts."""
    calls: tuple[ToolCall, ...]
    """The well-formed calls, with the ids that tool answers refer to."""
    parsed: ParsedResponse
    """The renderer's parse of the ids."""

    @property
    def thinks(self) -> bool:
        """True if the turn has a thought; an empty thinking block does not count."""
        return bool((self.parsed.reasoning_content or "").strip())


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """A prompt with everything needed to continue it. Immutable."""

    renderer: Renderer
    """The renderer that made the prompt."""
    messages: tuple[Message, ...]
    """The messages of the prompt. Sampled turns are stored as they were parsed."""
    tools: Schemas
    """The tool schemas in the prompt."""
    prompt_ids: Int32
    """The prompt: int32 [P]."""
    thinks: bool = False
    """True if the prompt contains a non-empty thought after its last user message."""
    said: SampledReply | None = None
    """The turn that was sampled after the prompt, or None before sampling."""
    extends: bool = False
    """True if the prompt extends the turn before it, exactly as it was sampled."""
    broken: BreakReason | None = None
    """Why the prompt does not extend the turn before it; None if it does extend that turn, or if no turn precedes
    it."""

    @classmethod
    def open(
        cls, renderer: Renderer, messages: Sequence[Message], tools: Schemas = None, broken: BreakReason | None = None
    ) -> Self:
        """Render a prompt from its messages.

        Raises:
            EnvironmentFault: the format refuses the messages.
            ModelError: the format would leave out a part of them.
        """
        ids = renderer.render_ids(messages, tools, add_generation_prompt=True)
        thinks = _continues(renderer) and renderer.holds_thoughts(messages)
        return cls(
            renderer=renderer, messages=tuple(messages), tools=tools, prompt_ids=ids, thinks=thinks, broken=broken
        )

    def answered(
        self,
        completion_ids: Int32,
        parsed: ParsedResponse | None = None,
        message: Message | None = None,
        calls: Sequence[ToolCall] | None = None,
    ) -> Self:
        """The conversation with a sampled turn added.

        Args:
            completion_ids: The ids as sampled, including the token that ended the turn: int32 [C].
            parsed: The renderer's parse of the ids. If None, the ids are parsed now.
            message: The message that represents the turn in later prompts; None means the parsed message.
            calls: The attempted calls with the ids that tool answers will refer to; None means the parsed calls.
        """
        if parsed is None:
            parsed = self.renderer.parse_response(completion_ids, self.prompt_ids, self.tools)
        readable = tuple(call for call in (parsed.tool_calls if calls is None else calls) if call.status == "ok")
        said = SampledReply(
            completion_ids=completion_ids,
            message=parsed.message() if message is None else message,
            calls=readable,
            parsed=parsed,
        )
        return dataclasses.replace(self, said=said)

    def retold(self, messages: Sequence[Message]) -> Self:
        """The same conversation with its messages replaced, for an owner that keeps the messages elsewhere.

        The last of `messages` represents the sampled turn. The ids do not change.
        """
        assert self.said is not None
        said = dataclasses.replace(self.said, message=messages[-1])
        return dataclasses.replace(self, messages=tuple(messages[:-1]), said=said)

    def continued(self, new_messages: Sequence[Message], tools: Schemas = None) -> Self:
        """The conversation with the next prompt.

        Its ids are the ids of this prompt and of its turn, unchanged, followed by what the format writes after the
        turn. If that is not possible, the next prompt is rendered from its messages, and `broken` of the new
        conversation has the reason.

        Raises:
            EnvironmentFault: the format refuses the messages.
            ModelError: the format would leave out a part of them.
        """
        following = self.bridged(new_messages, tools)
        if isinstance(following, BreakReason):
            assert self.said is not None
            messages = (*self.messages, self.said.message, *new_messages)
            return self.open(self.renderer, messages, tools, following)
        return following

    def bridged(self, new_messages: Sequence[Message], tools: Schemas = None) -> Self | BreakReason:
        """Like `continued`, but returns the reason instead of rendering the prompt from its messages."""
        assert self.said is not None, "nothing was sampled yet"
        ids = self._next_ids(new_messages, tools)
        if isinstance(ids, BreakReason):
            return ids
        spoke = any(message["role"] == "user" for message in new_messages)
        return dataclasses.replace(
            self,
            messages=(*self.messages, self.said.message, *new_messages),
            prompt_ids=ids,
            said=None,
            extends=True,
            broken=None,
            thinks=not spoke and (self.thinks or self.said.thinks),
        )

    def _next_ids(self, new_messages: Sequence[Message], tools: Schemas) -> Int32 | BreakReason:
        assert self.said is not None
        if _continues(self.renderer):
            return self.renderer.continue_conversation(self, new_messages, tools)
        if not same_tools(self.tools, tools):
            return BreakReason.TOOLS_CHANGED
        before = np.concatenate([self.prompt_ids, self.said.completion_ids])
        ids = self.renderer.bridge_to_next_turn(self.prompt_ids, self.said.completion_ids, new_messages, tools)
        # Checked, because a third-party renderer's bridge may re-tokenise the sampled text.
        if ids is None or not np.array_equal(ids[: len(before)], before):
            return BreakReason.FORMAT_UNKNOWN
        return ids


def _continues(renderer: Renderer) -> TypeGuard[ContinuesConversations]:
    """True if the renderer has the methods of `ContinuesConversations`. `isinstance` with a protocol would be slow, and
    this runs every turn."""
    return hasattr(renderer, "continue_conversation") and hasattr(renderer, "holds_thoughts")


def same_tools(before: Schemas, now: Schemas) -> bool:
    """True if two prompts have the same tool schemas. An empty list counts as equal to None."""
    return before is now or list(before or ()) == list(now or ())
