"""The handle by which a renderer continues a prompt: the messages, the tools, the ids and what was read of them.

    conversation = Conversation.open(renderer, messages, tools)         # P: rendered
    conversation = conversation.answered(completion_ids, parsed)        # C: sampled, and how it was read
    conversation = conversation.continued(new_messages)                 # P + C + B, or rendered anew, with the reason

Its owner is the episode or session that plays it. It is never changed, so several requests may continue the same one,
and nothing depends on which array object holds the ids.
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
"""At a user's message, whether thoughts go where the format drops them, or stay."""
History = Literal["verbatim", "template"]
"""Whether prompts continue what was sampled, or are rendered every time, as a chat endpoint does."""


class BreakReason(StrEnum):
    """Why a prompt was rendered anew. The values are stable. Those from `control_token` to `format_unknown` are (a) to
    (g) of the rule in `bridge`."""

    CONTROL_TOKEN = "control_token"
    """The completion holds, before its end, a control token that opens or closes a turn."""
    OTHER_END = "other_end"
    """The completion ended with a token that the format does not write between this turn and the new messages."""
    OPEN_THOUGHT = "open_thought"
    """The completion ended while a thought was open."""
    TOOLS_CHANGED = "tools_changed"
    """The tools are others than the prompt shows."""
    OTHER_MESSAGES = "other_messages"
    """The new messages are not all of tools and users."""
    THOUGHT_DROPPED = "thought_dropped"
    """The user has spoken, and the format drops a thought that was sampled before."""
    FORMAT_UNKNOWN = "format_unknown"
    """It is not known what the format writes behind this turn."""
    HISTORY_TEMPLATE = "history_template"
    """`history = "template"`: every prompt is rendered."""
    HISTORY_EDITED = "history_edited"
    """Earlier messages are not what they were."""

    @property
    def sentence(self) -> str:
        """The reason in words."""
        return _SENTENCES[self]

    @property
    def advice(self) -> str:
        """What to change for such turns to become fewer."""
        return _ADVICE[self]


_SENTENCES: Mapping[BreakReason, str] = {
    BreakReason.CONTROL_TOKEN: "the model sampled a token that opens or closes a turn inside of its own",
    BreakReason.OTHER_END: "the model ended its turn with a token that the format does not write there",
    BreakReason.OPEN_THOUGHT: "the model ended its turn inside of a thought",
    BreakReason.TOOLS_CHANGED: "the environment shows other tools than before",
    BreakReason.OTHER_MESSAGES: "the environment appended a message that is not of a tool or a user",
    BreakReason.THOUGHT_DROPPED: "the user has spoken, and the format drops what was thought before; with "
    'orchestrator.renderer.thinking_retention = "all" it stays',
    BreakReason.FORMAT_UNKNOWN: "it is not known what the format writes behind such a turn",
    BreakReason.HISTORY_TEMPLATE: 'history = "template" renders every prompt; orchestrator.renderer.history = '
    '"verbatim" continues what was sampled',
    BreakReason.HISTORY_EDITED: "the environment changed messages that were already sent",
}

_MORE_WARM_START = "the policy ends such turns seldom once it has learned the format: more warm_start.steps"
_ADVICE: Mapping[BreakReason, str] = {
    BreakReason.CONTROL_TOKEN: _MORE_WARM_START,
    BreakReason.OTHER_END: _MORE_WARM_START,
    BreakReason.OPEN_THOUGHT: _MORE_WARM_START,
    BreakReason.TOOLS_CHANGED: "have the environment show the same tools all episode long, and refuse a call instead",
    BreakReason.OTHER_MESSAGES: "have the environment say it as a user's message, or in a tool's answer",
    BreakReason.THOUGHT_DROPPED: 'orchestrator.renderer.thinking_retention = "all" keeps the thoughts',
    BreakReason.FORMAT_UNKNOWN: "`verbatim doctor --template MODEL` shows what a template of one's own writes "
    'otherwise; for a known model, orchestrator.renderer.name = "auto" takes its family',
    BreakReason.HISTORY_TEMPLATE: 'orchestrator.renderer.history = "verbatim" continues what was sampled',
    BreakReason.HISTORY_EDITED: "have the environment leave earlier messages as they are, and put what changes into "
    "the newest one; where it shortens them on purpose, set monitor.alarms.prompt_breaks = false",
}


class ContinuesConversations(Protocol):
    """A renderer that continues a conversation by its handle, and says why where it does not.

    For one without these methods `bridge_to_next_turn` is asked.
    """

    def continue_conversation(
        self, conversation: Conversation, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | BreakReason:
        """The next prompt, or why it has to be rendered anew."""

    def holds_thoughts(self, messages: Sequence[Message]) -> bool:
        """Whether the rendering of these messages holds a thought that is not empty, behind the last user's message."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledReply:
    """A sampled turn."""

    completion_ids: Int32
    """As sampled, the token that ended it included."""
    message: Message
    """What it reads as."""
    calls: tuple[ToolCall, ...]
    """Its readable calls, with the ids that answers name."""
    parsed: ParsedResponse
    """How the ids were read."""

    @property
    def thinks(self) -> bool:
        """Whether something was thought; an empty block is no thought."""
        return bool((self.parsed.reasoning_content or "").strip())


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """A prompt with everything that is needed to continue it. Never changed."""

    renderer: Renderer
    """Made the prompt."""
    messages: tuple[Message, ...]
    """What the prompt says, the sampled turns as they were read."""
    tools: Schemas
    """The schemas that it shows."""
    prompt_ids: Int32
    """The prompt: int32 [P]."""
    thinks: bool = False
    """Whether the prompt holds a thought that is not empty, behind its last user's message."""
    said: SampledReply | None = None
    """The turn that was sampled after the prompt; None: none yet."""
    extends: bool = False
    """Whether the prompt continues the turn before it, as it was sampled."""
    broken: BreakReason | None = None
    """Why it does not; None where it does, or where there is no turn before it."""

    @classmethod
    def open(
        cls, renderer: Renderer, messages: Sequence[Message], tools: Schemas = None, broken: BreakReason | None = None
    ) -> Self:
        """Render a prompt.

        Raises:
            EnvironmentFault: messages that the format refuses.
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
        """The conversation with a sampled turn.

        Args:
            completion_ids: As sampled, the token that ended it included: int32 [C].
            parsed: How the renderer read them; None: it reads them now.
            message: What stands for the turn in later messages; None: what was read.
            calls: The attempted calls with the ids that answers will name; None: as they were read.
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
        """The same conversation, with these messages up to the sampled turn and its own: for an owner that keeps them
        elsewhere."""
        assert self.said is not None
        said = dataclasses.replace(self.said, message=messages[-1])
        return dataclasses.replace(self, messages=tuple(messages[:-1]), said=said)

    def continued(self, new_messages: Sequence[Message], tools: Schemas = None) -> Self:
        """The next prompt: the ids of this one and of its turn unchanged, then what the format writes behind them; or
        rendered anew, with the reason.

        Raises:
            EnvironmentFault: messages that the format refuses.
            ModelError: the format would leave out a part of them.
        """
        following = self.bridged(new_messages, tools)
        if isinstance(following, BreakReason):
            assert self.said is not None
            messages = (*self.messages, self.said.message, *new_messages)
            return self.open(self.renderer, messages, tools, following)
        return following

    def bridged(self, new_messages: Sequence[Message], tools: Schemas = None) -> Self | BreakReason:
        """As `continued`, but where the prompt has to be rendered anew only the reason."""
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
        if ids is None or not np.array_equal(ids[: len(before)], before):
            return BreakReason.FORMAT_UNKNOWN
        return ids


def _continues(renderer: Renderer) -> TypeGuard[ContinuesConversations]:
    """Asked in every turn, where `isinstance` of a protocol is slow."""
    return hasattr(renderer, "continue_conversation") and hasattr(renderer, "holds_thoughts")


def same_tools(before: Schemas, now: Schemas) -> bool:
    """Whether two prompts show the same schemas; an empty list is none."""
    return before is now or list(before or ()) == list(now or ())
