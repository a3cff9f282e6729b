"""Defines the records that all chat protocols share: canonical requests, replies and deltas.

A protocol is pure: it turns bodies into records and back, and knows nothing of renderers, samplers or connections.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Float32, Int32, Message, MessageToolCall, StopReason, ToolCall

ToolChoice: TypeAlias = Literal["auto", "none", "required", "named"]
Finish: TypeAlias = Literal["stop", "stop_string", "tool_calls", "length"]
"""Why a reply ended: the model's end id, a stop string, tool calls, or the token limit."""


@dataclass(frozen=True, kw_only=True)
class RequestedSampling:
    """The sampling parameters in a request. None: not given; the server's default applies."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    """Maximum number of tokens in the completion."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Additional ids that end the completion."""
    ignore_eos: bool = False
    """True if the model's own end ids do not end the completion."""

    def params(self, defaults: SamplingParams, *, room: int, end_ids: Sequence[int] = ()) -> SamplingParams:
        """The sampling parameters with defaults filled in.

        Args:
            defaults: Values for what the request leaves out, except `max_tokens`, whose default is `room`.
            room: Tokens that the prompt leaves free in the context, at least 1; an upper limit of `max_tokens`.
            end_ids: The model's own end ids.

        >>> RequestedSampling(temperature=0.5).params(SamplingParams(top_p=0.9), room=100, end_ids=[2])
        ... # doctest: +NORMALIZE_WHITESPACE
        SamplingParams(temperature=0.5, max_tokens=100, top_p=0.9, top_k=0, min_p=0.0, stop_token_ids=(2,), stop=(),
        return_kept_sets=False)
        """

        def given(name: str) -> Any:
            value = getattr(self, name)
            return getattr(defaults, name) if value is None else value

        ends = (*self.stop_token_ids, *(() if self.ignore_eos else end_ids))
        return SamplingParams(
            **{name: given(name) for name in ("temperature", "top_p", "top_k", "min_p")},
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            stop_token_ids=tuple(dict.fromkeys(ends)),
            return_kept_sets=defaults.return_kept_sets,
        )


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """A tool's form in the protocol, if it differs from the function that the model sees."""

    name: str
    """The tool's name in the protocol."""
    namespace: str = ""
    """The namespace of the tool; "" = none."""
    is_custom: bool = False
    """True if the tool takes one text instead of an object of arguments."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for assistant messages, independent of its protocol."""

    protocol: str
    """"openai_chat", "openai_responses" or "anthropic_messages"."""
    model: str = ""
    """The model's name in the request; "" = none."""
    messages: tuple[Message, ...]
    """The conversation. Content is one text; arguments of calls are objects if they could be parsed."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas in OpenAI's format."""
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """By function name: tools that have another form in the protocol."""
    tool_choice: ToolChoice = "auto"
    """"required" and "named" occur only if `Options.unenforced` accepts them."""
    tool_name: str = ""
    """Name of the tool for "named"."""
    parallel_tool_calls: bool = True
    """True if one reply may call several tools."""
    sampling: RequestedSampling = field(default_factory=RequestedSampling)
    stop: tuple[str, ...] = ()
    """Stop strings: the reply's text ends before the first of them."""
    n: int = 1
    """Number of replies, sampled independently."""
    stream: bool = False
    """True if the reply is sent as it is sampled."""
    include_usage: bool = False
    """True if a stream of OpenAI's chat completions ends with the token counts."""
    include_logprobs: bool = False
    """True if the response includes the logprobs."""
    include_token_ids: bool = False
    """True if the response includes the ids of prompt and completion (vLLM's `return_token_ids`)."""
    session: str = ""
    """Groups requests for prefix caching; may be empty."""
    unenforced: tuple[str, ...] = ()
    """Fields that were accepted but not enforced; for counters."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the response has to repeat."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatReply:
    """One assistant message, and the tokens that were sampled for it."""

    content: str
    reasoning_content: str | None = None
    """The thinking; None if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every attempted call, each with an id. A call that cannot be parsed has its raw text as arguments."""
    stop_reason: StopReason = StopReason.STOP
    """"stop" or "length"."""
    stop_string: str | None = None
    """The stop string that ended the reply; None if none did. Its tokens are part of `ids`, but not its text of the
    texts."""
    ids: Int32
    """Sampled ids: int32 [C]."""
    logprobs: Float32 | None = None
    """Logprob of each id: float32 [C]; None: the engine reports none."""
    policy_versions: Int32 | None = None
    """Policy version of each id: int32 [C]; None: the engine reports none."""
    token_texts: tuple[str, ...] = ()
    """Text of each id decoded alone, if the request wants logprobs."""
    prompt_ids: Int32 | None = None
    """The prompt: int32 [P], if the request wants ids."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache; None: the engine does not report it."""
    num_cut_tokens: int = 0
    """Tokens sampled after a stop string or after the only allowed call; they are not in `ids`."""
    seed: int | None = None
    """The seed that the reply was sampled with."""

    @property
    def finish(self) -> Finish:
        """Why the reply ended."""
        if self.stop_reason is not StopReason.STOP:
            return "length"
        if self.stop_string is not None:
            return "stop_string"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def message(self) -> Message:
        """The assistant message of the response, including malformed calls."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [_message_call(call) for call in self.tool_calls]
        return message


def _message_call(call: ToolCall) -> MessageToolCall:
    arguments: str | dict[str, Any] = call.raw if call.arguments is None else dict(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name or "", "arguments": arguments}}


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as JSON text; the sampled text for a call that cannot be parsed."""
    return call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """The growth of a reply since the last delta. Thinking comes before content; calls come with the end only."""

    index: int = 0
    """Index among the `n` replies."""
    reasoning: str = ""
    """New thinking."""
    content: str = ""
    """New text."""
    tokens: tuple[TokenLogprob, ...] = ()
    """New tokens, if the request wants logprobs."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A sampled token with its logprob."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Id, time and model name of a response."""

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random id of letters and digits; each protocol adds its own prefix."""
    created: int = 0
    """Unix time in seconds."""
    model: str = ""
    """The model's name in responses."""


UNENFORCEABLE = frozenset(
    {
        "tool_choice",
        "response_format",
        "reasoning_effort",
        "verbosity",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "thinking",
        "context_management",
        "truncation",
        "other_tools",
        "tool_grammar",
        "name",
    }
)
"""Fields that `Options.unenforced` may name: by their names in OpenAI's chat completions, or else in the protocol that
they belong to. All of them would need another distribution than the model's own, or another prompt."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a server accepts beyond the fields that it can honour."""

    unenforced: frozenset[str] = frozenset()
    """Fields that cannot be honoured but are accepted anyway, without effect; their uses are counted. Each must be in
    `UNENFORCEABLE`."""
    max_n: int = 64
    """Maximum number of replies to one request."""

    def __post_init__(self) -> None:
        unknown = self.unenforced - UNENFORCEABLE
        if unknown:
            raise ValueError(
                f"unenforced: {', '.join(sorted(unknown))}; expected some of {', '.join(sorted(UNENFORCEABLE))}"
            )


class ChatStream(Protocol):
    """Writes the server-sent events of one response, in the protocol's order."""

    ping: bytes
    """Keep-alive bytes that clients ignore."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The events before the first token."""

    def delta(self, delta: ChatDelta) -> bytes:
        """The events of a delta; may be empty."""

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The rest of every reply, its end, and the token counts.

        Raises:
            ValueError: the texts of the deltas are not the beginning of the replies' texts.
        """

    def error(self, status: int, message: str) -> bytes:
        """The event of an error, which ends the stream."""


def pieces(text: str, size: int = 8192) -> Iterator[str]:
    """Split a long text, so that events have a bounded size."""
    return (text[start : start + size] for start in range(0, len(text), size))
