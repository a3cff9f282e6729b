"""Defines the records that all chat protocols share: requests in canonical form, replies and deltas.

A protocol is pure: it converts between bodies and records, and knows nothing about renderers, samplers or connections.
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
"""Why a reply ended: an end id of the model ("stop"), a stop string, tool calls, or the token limit."""


@dataclass(frozen=True, kw_only=True)
class RequestedSampling:
    """The sampling parameters in a request. A parameter that is not given is None, and the server's default applies."""

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
        """Fill in the defaults.

        Args:
            defaults: Values of the parameters that the request leaves out. The default of `max_tokens` is `room`.
            room: Number of tokens that still fit in the context after the prompt, at least 1. A larger `max_tokens` is
                reduced to this number.
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
    """The namespace of the tool; "" if it has none."""
    is_custom: bool = False
    """True if the tool takes a single string instead of an object of arguments."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for assistant messages, independent of its protocol."""

    protocol: str
    """"openai_chat", "openai_responses" or "anthropic_messages"."""
    model: str = ""
    """The model's name in the request; "" if it has none."""
    messages: tuple[Message, ...]
    """The conversation. Content is one string; the arguments of calls are objects if they could be parsed."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas in OpenAI's format."""
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """The tools whose form in the protocol is not a plain function, by function name."""
    tool_choice: ToolChoice = "auto"
    """"required" and "named" occur only if `Options.unenforced` accepts them."""
    tool_name: str = ""
    """Name of the tool if `tool_choice` is "named"."""
    parallel_tool_calls: bool = True
    """True if one reply may call several tools."""
    sampling: RequestedSampling = field(default_factory=RequestedSampling)
    stop: tuple[str, ...] = ()
    """Stop strings. The reply's text ends before the first that occurs."""
    n: int = 1
    """Number of replies, sampled independently."""
    stream: bool = False
    """True if the reply is sent as it is sampled."""
    include_usage: bool = False
    """True if a stream ends with the token counts. Used only by OpenAI's chat completions."""
    include_logprobs: bool = False
    """True if the response includes the logprobs."""
    include_token_ids: bool = False
    """True if the response includes the ids of prompt and completion (vLLM's `return_token_ids`)."""
    session: str = ""
    """Name that groups requests for prefix caching; may be empty."""
    unenforced: tuple[str, ...] = ()
    """Fields that were accepted but are not enforced, to be counted."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the response has to repeat."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatReply:
    """One assistant message, and the tokens that were sampled for it."""

    content: str
    reasoning_content: str | None = None
    """The thinking; None if there is no thinking."""
    tool_calls: tuple[ToolCall, ...] = ()
    """All attempted calls, each with an id. A call that cannot be parsed keeps its text in `raw`."""
    stop_reason: StopReason = StopReason.STOP
    """"stop" or "length"."""
    stop_string: str | None = None
    """The stop string that ended the reply; None if no stop string ended it. The stop string's tokens are part of
    `ids`, but its text is not part of `content` or `reasoning_content`."""
    ids: Int32
    """Sampled ids: int32 [C]."""
    logprobs: Float32 | None = None
    """Logprob of each id: float32 [C]; None if the engine does not report logprobs."""
    policy_versions: Int32 | None = None
    """Policy version of each id: int32 [C]; None if the engine does not report versions."""
    token_texts: tuple[str, ...] = ()
    """Text of each id decoded alone; empty unless the request asks for logprobs."""
    prompt_ids: Int32 | None = None
    """The prompt: int32 [P]; None unless the request asks for ids."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Number of prompt tokens that came from the prefix cache; None if the engine does not report it."""
    num_cut_tokens: int = 0
    """Number of tokens sampled after a stop string or after the only allowed call. They are not in `ids`."""
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
    """The arguments of a call as JSON text, or as they were sampled if they cannot be parsed."""
    return call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """What a reply has gained since the last delta. Thinking comes before content. Calls are only sent at the end."""

    index: int = 0
    """Index among the `n` replies."""
    reasoning: str = ""
    """New thinking."""
    content: str = ""
    """New text."""
    tokens: tuple[TokenLogprob, ...] = ()
    """New tokens, if the request asks for logprobs."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A sampled token with its logprob."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Id, creation time and model name of a response."""

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random id of letters and digits, to which each protocol adds its own prefix."""
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
"""The fields that `Options.unenforced` may name. Each field is listed under its name in OpenAI's chat completions; a
field that chat completions do not have is listed under its name in the protocol that has it. Honouring any of these
fields would change the prompt or the sampling distribution."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which unenforceable fields a server accepts, and the maximum number of replies per response."""

    unenforced: frozenset[str] = frozenset()
    """Fields from `UNENFORCEABLE` that are accepted without effect. Each use is counted."""
    max_n: int = 64
    """Maximum number of replies in one response."""

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
        """The events for a delta; may be empty."""

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The events with the rest of every reply, its finish reason, and the token counts.

        Raises:
            ValueError: a reply does not begin with the text that was streamed.
        """

    def error(self, status: int, message: str) -> bytes:
        """The error event, which ends the stream."""


def pieces(text: str, size: int = 8192) -> Iterator[str]:
    """Split a long text to bound the size of events."""
    return (text[start : start + size] for start in range(0, len(text), size))
