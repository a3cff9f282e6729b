"""Defines what a chat protocol reads and writes: canonical requests, replies and deltas.

A protocol is pure: bodies in, records out, and back. It knows nothing of renderers, samplers and connections.
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
"""Why a reply ended: the model's own end, a stop string, calls of tools, or the limit of tokens."""


@dataclass(frozen=True, kw_only=True)
class RequestedSampling:
    """The sampling parameters that a request gives; None: it gives none, and the server's defaults hold."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    """Most tokens of the completion."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end the completion."""
    ignore_eos: bool = False
    """Whether the model's own end ids do not end it."""

    def params(self, defaults: SamplingParams, *, room: int, end_ids: Sequence[int] = ()) -> SamplingParams:
        """Parameters of the sampler.

        Args:
            defaults: Of what the request does not give; not of `max_tokens`, which is then `room`.
            room: Tokens that the prompt leaves in the context, at least 1; more than that are not asked for.
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
    """How a protocol calls a tool that the model is shown as a function of another name or form."""

    name: str
    """Its own name."""
    namespace: str = ""
    """What its name is unique in; "" = the request."""
    is_custom: bool = False
    """Whether it takes one text, and no object of arguments."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for assistant messages, whatever protocol it came in."""

    protocol: str
    """"openai_chat", "openai_responses" or "anthropic_messages"."""
    model: str = ""
    """The model's name in the request; "" = none."""
    messages: tuple[Message, ...]
    """The conversation. Content is one text; arguments of calls are objects where they can be read."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of functions, in OpenAI's format."""
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """Tools that the protocol calls otherwise, by the names of these functions."""
    tool_choice: ToolChoice = "auto"
    """"required" and "named" only where a reader was told to let them pass (`Options.unenforced`)."""
    tool_name: str = ""
    """The tool of "named"."""
    parallel_tool_calls: bool = True
    """Whether one reply may call several tools."""
    sampling: RequestedSampling = field(default_factory=RequestedSampling)
    stop: tuple[str, ...] = ()
    """A reply ends before the first of these texts."""
    n: int = 1
    """Replies, each sampled on its own."""
    stream: bool = False
    """Whether the reply is sent as it is sampled."""
    include_usage: bool = False
    """Whether a stream of OpenAI's chat completions ends with the counts of tokens."""
    include_logprobs: bool = False
    include_token_ids: bool = False
    """Whether the answer has the ids of prompt and completion (vLLM's `return_token_ids`)."""
    session: str = ""
    """Groups requests for prefix caching; may be empty."""
    unenforced: tuple[str, ...] = ()
    """Fields that were let pass without effect, for counts."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the answer has to repeat."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatReply:
    """One assistant message, and the tokens it was sampled as."""

    content: str
    reasoning_content: str | None = None
    """The thinking; None without any."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Every attempted call, each with an id. The arguments of one that cannot be read are its raw text."""
    stop_reason: StopReason = StopReason.STOP
    """"stop" or "length"."""
    stop_string: str | None = None
    """The stop string that ended it; None: something else did. It is part of `ids`, not of the texts."""
    ids: Int32
    """Sampled ids: int32 [C]."""
    logprobs: Float32 | None = None
    """float32 [C]; None: the engine gives none."""
    policy_versions: Int32 | None = None
    """int32 [C]; None: the engine gives none."""
    token_texts: tuple[str, ...] = ()
    """Text of each id by itself, where the request wants logprobs."""
    prompt_ids: Int32 | None = None
    """The prompt: int32 [P], where the request wants ids."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that came from a prefix cache; None: the engine does not say."""
    num_cut_tokens: int = 0
    """Tokens that were sampled behind a stop string or behind the only call allowed, and are not in `ids`."""
    seed: int | None = None
    """The seed that it was sampled with."""

    @property
    def finish(self) -> Finish:
        """Why it ended."""
        if self.stop_reason is not StopReason.STOP:
            return "length"
        if self.stop_string is not None:
            return "stop_string"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def message(self) -> Message:
        """The assistant message as it is answered, malformed calls included."""
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
    """The arguments of a call as protocols write them: JSON, or the sampled text of a call that cannot be read."""
    return call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """What a reply has gained since the last delta. Thinking comes before content, and calls come with the end."""

    index: int = 0
    """Which of the `n` replies."""
    reasoning: str = ""
    content: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    """Tokens sampled since, where the request wants logprobs."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A sampled token with its logprob."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What identifies an answer."""

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Letters and digits; the protocol puts its own prefix before it."""
    created: int = 0
    """Seconds since 1970."""
    model: str = ""
    """The model's name in answers."""


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
has them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a server lets pass."""

    unenforced: frozenset[str] = frozenset()
    """Fields that would change what is sampled and cannot be honoured here, which are accepted all the same, without
    effect, and counted. Only those in `UNENFORCEABLE`."""
    max_n: int = 64
    """Most replies to one request."""

    def __post_init__(self) -> None:
        unknown = self.unenforced - UNENFORCEABLE
        if unknown:
            raise ValueError(
                f"unenforced: {', '.join(sorted(unknown))}; expected some of {', '.join(sorted(UNENFORCEABLE))}"
            )


class ChatStream(Protocol):
    """Writes the server-sent events of one answer, in the protocol's order."""

    ping: bytes
    """Something that clients pass over, so that the connection does not look dead."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The events before the first token."""

    def delta(self, delta: ChatDelta) -> bytes:
        """What has been gained; may be empty."""

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The rest of every reply, their ends and the counts.

        The texts of all deltas and of this together are those of the replies; `ValueError` where they are not.
        """

    def error(self, status: int, message: str) -> bytes:
        """An error that ends the stream."""


def pieces(text: str, size: int = 8192) -> Iterator[str]:
    """A long text in parts, for events of a bounded size."""
    return (text[start : start + size] for start in range(0, len(text), size))
