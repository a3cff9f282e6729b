"""Renders gpt-oss in OpenAI's harmony format, with its chat template and local tokenizer (nothing is downloaded)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from renderers.parsing import parse_gpt_oss

from verbatim.core.errors import EnvironmentFault, ModelError, TemplateFault
from verbatim.core.types import Int32, Message, ToolCall
from verbatim.models.renderers.bridge import ContinuingRenderer
from verbatim.models.renderers.conversation import Conversation
from verbatim.models.renderers.renderer import ParsedResponse, Schemas
from verbatim.models.renderers.responses import (
    NOT_JSON,
    arguments_as_value,
    check_call,
    read_completion,
    read_json,
    unreadable,
)
from verbatim.models.renderers.sampled_text import shown
from verbatim.models.renderers.special_token_escaping import EscapingTokenizer, Marked
from verbatim.models.renderers.stand_ins import StandIns
from verbatim.models.renderers.stop_ids import turn_ends

_RECIPIENT = re.compile(r"\s*\bto=functions\.([^\s<]*)")
_HEADER = re.compile(
    r"\s*(?:assistant)?\s*<\|channel\|>\s*(?:commentary|analysis)\s*(?:<\|constrain\|>)?\s*(?:json)?\s*"
)
"""Matches the header of a call's message after the recipient has been removed from the header."""
_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")


class HarmonyRenderer(ContinuingRenderer):
    """The harmony format for one tokenizer.

    The gpt-oss family of the package `renderers` is not used: it encodes with a vocabulary that `openai-harmony`
    downloads, and its generation prompt differs from the chat template's
    (`<|start|>assistant<|channel|>analysis<|message|>`). This class gives the ids of the chat template, on every
    machine.

    A completion is a sequence of messages, each with a header. The completion ends with `<|return|>` after an answer,
    or with `<|call|>` after a call:

        <|channel|>analysis<|message|>Look first.<|end|><|start|>assistant<|channel|>commentary to=functions.look
        <|constrain|>json<|message|>{"place": "Bonn"}<|call|>

    Prompts continue by the rule in `bridge`. In earlier turns the template closes an answer with `<|end|>`, so the
    prompt after an answer that was sampled with `<|return|>` always breaks (`other_end`).

    Raises:
        ModelError: the tokenizer lacks harmony's tokens, or its chat template writes another format.
    """

    renders_by_template = True
    """This renderer uses the chat template itself, so there is nothing to compare with the template."""

    def __init__(self, tokenizer: Any, name: str = "gpt-oss", **kept: Any) -> None:
        super().__init__(tokenizer, name, **kept)
        control = self.tokenizer.control_tokens
        missing = [token for token in _TOKENS if token not in control]
        if missing:
            raise ModelError(
                f'the tokenizer does not fit renderer "{name}": it has no token {missing[0]}; use '
                'renderer = "auto" or "template"'
            )
        self._ids = {f"{token.strip('<|>')}_id": control[token] for token in _TOKENS}
        self._parser = _Parser(self.tokenizer, self.tokenizer.encode("<|start|>assistant"), self._ids)
        stops = ("<|return|>", "<|call|>", "<|endoftext|>")
        own = [control[token] for token in stops if token in control]
        self.stop_token_ids: tuple[int, ...] = tuple(own)
        self._stand_ins = StandIns(self._text_of, ("<|end|>", "<|call|>", "<|return|>"))
        self._role = self.tokenizer.encode("assistant")
        try:
            self._check_format()
        except (EnvironmentFault, TemplateFault) as error:
            raise ModelError(str(error)) from error
        self.stop_token_ids = turn_ends(own, self.tokenizer, name)

    def write_ids(self, messages: Sequence[Message], tools: Schemas, add_generation_prompt: bool) -> Int32:
        """Like `render_ids`, but does not refuse messages of which the template leaves out a part."""
        text = self._text_of(messages, tools, add_generation_prompt=add_generation_prompt)
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Parse a completion. Never raises on anything that a model may sample. Text without a header is content."""
        ids = completion_ids.tolist()
        stop = self._end_of_turn(ids)
        # `<|call|>` is kept, because a call without it counts as unclosed.
        ids = ids[: stop + 1] if ids[stop : stop + 1] == [self._ids["call_id"]] else ids[:stop]
        if self._ids["message_id"] not in ids:
            return ParsedResponse(content=self.tokenizer.decode(ids))
        return read_completion(
            self._parser, self.tokenizer, ids, None, tools, lambda *_: ("", self._calls(ids)), has_thought_marks=False
        )

    def _calls(self, ids: list[int]) -> list[ToolCall]:
        """Every attempted call: each message whose recipient is a function."""
        calls = []
        for message in self._sampled.of(ids).split("<|start|>"):
            header, found, body = message.partition("<|message|>")
            if found and "to=functions." in header:
                calls.append(_call(header, body, shown(self._sampled.control.sub("", body))))
        return calls

    def _behind(self, conversation: Conversation, body: Int32, new_messages: Sequence[Message]) -> list[int] | None:
        said = conversation.said
        assert said is not None
        text = self._stand_ins.behind(conversation.messages, conversation.tools, said.calls, new_messages)
        return None if text is None else self.tokenizer.encode(text)

    def _holds_turn_token(self, body: list[int]) -> bool:
        """True if a message inside the turn is not the assistant's, or if the turn is closed before its end.

        A harmony turn consists of several messages, so `<|start|>` alone does not open another turn.
        """
        starts = [place for place, token in enumerate(body) if token == self._ids["start_id"]]
        begun = (body[place + 1 :] for place in starts)
        return any(after[: len(self._role)] != self._role for after in begun) or not self._closing.isdisjoint(body)

    @cached_property
    def _closing(self) -> frozenset[int]:
        return frozenset((*self.stop_token_ids, self.tokenizer.control_tokens.get("<|startoftext|>", -1)))

    def _text_of(
        self,
        messages: Sequence[Any],
        tools: Any,
        marked: Marked | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the messages, escaped, to text. `marked` is passed to `SpecialTokenEscaper.messages`."""
        escaper = self.tokenizer.escaper
        fields = [_as_template_reads(message) for message in escaper.messages(messages, marked)]
        return self.tokenizer.chat_text(fields, escaper.tools(tools), add_generation_prompt)

    def _check_format(self) -> None:
        """Check that a call written by the chat template is parsed back as the same call."""
        ask: Message = {"role": "user", "content": "x"}
        call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
        }
        if not self.tokenizer.chat_template:
            raise ModelError(
                f'renderer "{self.name}" renders with the chat template, and the tokenizer has none; put the '
                "model's chat_template.jinja into its folder"
            )
        prompt = self.render_ids([ask])
        whole = self.render_ids([ask, call], add_generation_prompt=False)
        completion = whole[len(prompt) :]
        read = self.parse_response(completion)
        if (
            not np.array_equal(whole[: len(prompt)], prompt)
            or read.message() != call
            or whole[-1] not in (self.stop_token_ids)
        ):
            raise ModelError(
                f'this chat template does not write the format of renderer "{self.name}"; use renderer = '
                '"auto" or "template"'
            )


@dataclass(frozen=True)
class _Parser:
    """Gives the harmony parser of the package `renderers` the interface of a family, which `read_completion` needs."""

    tokenizer: EscapingTokenizer
    """The tokenizer that decodes names and bodies."""
    header: list[int]
    """The ids with which the generation prompt begins the first message. Completions do not contain them."""
    ids: Mapping[str, int]
    """The ids of harmony's tokens, by the parser's argument names."""

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        header = [] if ids[0] == self.ids["start_id"] else self.header
        return parse_gpt_oss(self.tokenizer, [*header, *ids], **self.ids)


def _call(header: str, body: str, raw: str) -> ToolCall:
    """Parse a call. It is well-formed if its header has only the expected parts and its body is a single JSON object.

    Args:
        header: The text before `<|message|>`, as `sampled_text.hide` returns it.
        body: The text after it, up to the next message.
        raw: The body as it was sampled, without control tokens.
    """
    recipients = _RECIPIENT.findall(header)
    rest = _RECIPIENT.sub(" ", header)
    if not body.endswith("<|call|>"):
        return unreadable(raw, "unclosed_block")
    if len(recipients) != 1 or _HEADER.fullmatch(rest) is None:
        return unreadable(raw, "malformed_structure")
    if not recipients[0]:
        return unreadable(raw, "missing_name")
    value = read_json(shown(body.removesuffix("<|call|>")))
    return unreadable(raw, "invalid_json") if value is NOT_JSON else check_call(shown(recipients[0]), value, "ok", raw)


def _as_template_reads(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the template reads it, with reasoning as `thinking`, and arguments as a value.

    The template writes only one text before a call, the analysis. So the content of a message with a call is appended
    to the analysis.
    """
    fields = dict(message)
    thinking = fields.pop("reasoning_content", None)
    if fields.get("content") is None:
        fields["content"] = ""
    calls = fields.pop("tool_calls", None) or []
    if len(calls) > 1:
        raise EnvironmentFault(
            f"an assistant message contains {len(calls)} calls; in harmony each call is a message of "
            "its own, followed by the call's result: split the message"
        )
    if calls:
        function = calls[0]["function"]
        fields["tool_calls"] = [
            {**calls[0], "function": {**function, "arguments": arguments_as_value(function.get("arguments"))}}
        ]
        if thinking and fields["content"]:
            thinking = f"{thinking}\n{fields['content']}"
            fields["content"] = ""
    if thinking is not None:
        fields["thinking"] = thinking
    return fields
