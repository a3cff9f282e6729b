"""Renders any model through its chat template, and finds by rendering what the template writes after a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np

from verbatim.core.errors import EnvironmentFault, ModelError, TemplateFault
from verbatim.core.types import Int32, Message
from verbatim.models.renderers.bridge import ContinuingRenderer
from verbatim.models.renderers.call_ids import CallIds, find_call_ids
from verbatim.models.renderers.conversation import Conversation
from verbatim.models.renderers.derived_syntax import derive
from verbatim.models.renderers.hermes import SYNTAX, HermesFormat, fit
from verbatim.models.renderers.probe_messages import ANSWER, ASK, RESULT, TOOL, calling, tried
from verbatim.models.renderers.renderer import ParsedResponse, Schemas
from verbatim.models.renderers.responses import arguments_as_value
from verbatim.models.renderers.sampled_text import shown
from verbatim.models.renderers.special_token_escaping import Marked
from verbatim.models.renderers.stable_text import settled
from verbatim.models.renderers.stand_ins import StandIns
from verbatim.models.renderers.stop_ids import turn_ends
from verbatim.models.renderers.tool_support import COMPLETE, ToolSupport, probe

_OPEN, _CLOSE = "<think>", "</think>"


class TemplateRenderer(ContinuingRenderer):
    """Renders with the tokenizer's own chat template.

    Prompts continue by the rule in `bridge`; `stand_ins` finds what the template writes after a turn.

    Thinking is parsed between `<think>` and `</think>`, and tool calls in the syntax in which the template itself
    writes them (`derived_syntax`). A conversation with tools is refused if the template would leave out a part of it.

    `tools="hermes"` is for a template without tool support: `hermes` then writes schemas, calls and answers into plain
    messages.

    Raises:
        ModelError: there is no chat template, its rendering exceeds the budget, no token ends a turn, or `tools` do not
            fit the template.
    """

    renders_by_template = True
    """This renderer uses the template itself, so there is nothing to compare with the template."""
    thread_safe = True
    """Several threads may use one renderer at the same time."""

    def __init__(
        self, tokenizer: Any, name: str = "template", tools: Literal["hermes"] | None = None, **kept: Any
    ) -> None:
        super().__init__(tokenizer, name, **kept)
        self.tool_format = tools
        if not self.tokenizer.chat_template:
            raise ModelError("the tokenizer has no chat template; put a chat_template.jinja into the model's folder")
        self._arguments_as_text = False
        try:
            # Refuse a template that exceeds its budget now, instead of in the middle of a run.
            for given, dialogue in product((None, [TOOL]), ([ASK], [ASK, ANSWER], [ASK, calling(), RESULT])):
                tried(self.tokenizer.chat_text, dialogue, given)
            self._find_out(tools)
        except TemplateFault as error:
            raise ModelError(str(error)) from error

    def _find_out(self, tools: Literal["hermes"] | None) -> None:
        """Find the template's properties by rendering probes. The order matters: each step uses earlier results."""
        tokens = self.tokenizer.control_tokens
        as_values, as_texts = [ASK, calling()], [ASK, with_arguments(calling(), as_text=True)]
        chat_text = self.tokenizer.chat_text
        # Arguments are passed as text only if the template refuses values, because templates that accept both would
        # quote JSON text a second time.
        self._arguments_as_text = not tried(chat_text, as_values) and bool(tried(chat_text, as_texts))
        self._hermes: HermesFormat | None = None
        if tools is not None:
            self._hermes = fit(self._render, tokens)
        try:
            self._preamble = self._find_preamble()
        except EnvironmentFault as error:
            raise ModelError(f"the chat template cannot render one question and its answer: {error}") from error
        self.stop_token_ids = self._find_stop_tokens()
        stops = self.end_texts
        self._syntax = SYNTAX if self._hermes is not None else derive(self._render, stops)
        self._stand_ins = StandIns(self._text_of, stops)

    def write_ids(self, messages: Sequence[Message], tools: Schemas, add_generation_prompt: bool) -> Int32:
        """Like `render_ids`, for valid messages, but does not refuse messages of which the template leaves out a
        part."""
        text = self._text_of(messages, tools, add_generation_prompt=add_generation_prompt)
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)

    def write_lines(
        self, messages: Sequence[Message], tools: Schemas, add_generation_prompt: bool
    ) -> list[tuple[str, int]]:
        """The text of `write_ids` in pieces, each with the line of the template that wrote it."""
        marked, shown_tools = self._marked(messages, tools)
        template = self.tokenizer.template(self._given(shown_tools))
        return template.lines(self._with_arguments(marked), self._given(shown_tools), add_generation_prompt)

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Parse a completion. Never raises on anything that a model may sample."""
        reasoning, text, is_open = self._thought_apart(completion_ids, prompt_ids)
        content, calls = self._syntax.read(text, tools or ()) if self._syntax is not None else (text, ())
        calls = tuple(map(self._call_ids.sampled, calls))
        content = content if calls else content.removeprefix(self._preamble)
        content = self._sampled.without_control(content)
        return ParsedResponse(content=content, reasoning_content=reasoning, tool_calls=calls, thought_open=is_open)

    def stable_text(self, completion_ids: Int32, prompt_ids: Int32 | None = None) -> tuple[str, str]:
        """The part of an unfinished completion that further tokens cannot change, as (thinking, content)."""
        text, thinking = self._text_and_thought(completion_ids, prompt_ids)
        if not thinking and _OPEN.startswith(text.lstrip()[: len(_OPEN)]):
            return "", ""  # the text so far may be the beginning of thinking
        reasoning = ""
        if thinking:
            reasoning, closed, text = text.partition(_CLOSE)
            reasoning = reasoning.lstrip("\n")
            if not closed:
                return shown(settled(reasoning, [_CLOSE])), ""
            reasoning, text = reasoning.strip("\n"), text.lstrip("\n")
        return shown(reasoning), self._stable_content(text)

    def _stable_content(self, text: str) -> str:
        """The part of the text after the thinking that further tokens cannot change."""
        marks: list[str] = []
        if self._preamble:
            return ""  # whether the preamble is removed depends on whether a call follows, which is not known yet
        if self._syntax is not None:
            if not self._syntax.opens and (not text.strip() or text.lstrip().startswith("{")):
                return ""  # the whole text may be a call
            marks = self._syntax.marks
        return self._sampled.without_control(settled(text, marks))

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Which tool features the template can write: schemas, calls, and tools' answers."""
        if self._hermes is not None:
            return COMPLETE
        return probe(self._render, reads=self._syntax is not None)

    @cached_property
    def _call_ids(self) -> CallIds:
        if self._hermes is not None:
            return CallIds("unwritten")
        return find_call_ids(self._render)

    @property
    def room_for_tools(self) -> str:
        """Where `tools="hermes"` writes schemas and answers, worded for messages."""
        assert self._hermes is not None
        return f"schemas in a {self._hermes.opening} message, answers in a {self._hermes.answering} message"

    def _marked(
        self, messages: Sequence[Message], tools: Schemas, marked: Marked | None = None
    ) -> tuple[list[dict[str, Any]], Any]:
        """(escaped messages in the form that the template gets, escaped schemas)."""
        escaper = self.tokenizer.escaper
        shown_tools = escaper.tools(tools)
        return self._wrapped(escaper.messages(self._call_ids.rewritten(messages), marked), shown_tools), shown_tools

    def _wrapped(self, messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Escaped messages in the form that the template gets."""
        parsed = [with_arguments(message, as_text=False) for message in messages]
        return parsed if self._hermes is None else self._hermes.wrap(parsed, tools)

    def _given(self, tools: Any) -> Any:
        """The escaped schemas to pass to the template; None with Hermes, whose messages already contain them."""
        return tools if self._hermes is None else None

    def _behind(self, conversation: Conversation, body: Int32, new_messages: Sequence[Message]) -> list[int] | None:
        said = conversation.said
        assert said is not None
        calls, new_messages = self._call_ids.continuing(conversation.messages, said, new_messages)
        text = self._stand_ins.behind(conversation.messages, conversation.tools, calls, new_messages)
        if text is None:
            return None
        ids = self.tokenizer.encode(text)
        if not said.parsed.thought_open:
            return ids
        # The turn was cut off inside a thought. Close the thought too if its close is a single token.
        close = self.tokenizer.control_tokens.get(_CLOSE)
        return None if close is None else [close, *ids]

    def _text_of(
        self,
        messages: Sequence[Any],
        tools: Any,
        marked: Marked | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the messages, escaped, to text. `marked` is passed to `SpecialTokenEscaper.messages`."""
        shown, shown_tools = self._marked(messages, tools, marked)
        return self._render(shown, self._given(shown_tools), add_generation_prompt)

    def _thought_apart(self, completion_ids: Int32, prompt_ids: Int32 | None) -> tuple[str | None, str, bool]:
        """(thinking or None, remaining text as `hide` returns it, whether the completion ends inside the thinking)."""
        text, thinking = self._text_and_thought(completion_ids, prompt_ids)
        if not thinking:
            return None, text, False
        reasoning, closed, text = text.partition(_CLOSE)
        return shown(reasoning.strip("\n")), text.lstrip("\n"), not closed

    def _text_and_thought(self, completion_ids: Int32, prompt_ids: Int32 | None) -> tuple[str, bool]:
        """(a completion's text as `hide` returns it, without an opening `<think>`; True if it begins with thinking)."""
        ids = completion_ids.tolist()
        text = self._sampled.of(ids[: self._end_of_turn(ids)])
        # The last ids are enough to see whether the prompt ends with `<think>`. Decoding the whole prompt in every turn
        # is slow.
        thinking = prompt_ids is not None and self._sampled.of(prompt_ids[-8:].tolist()).rstrip().endswith(_OPEN)
        if not thinking and text.lstrip().startswith(_OPEN):
            return text.lstrip().removeprefix(_OPEN), True
        return text, thinking

    def _render(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        return self.tokenizer.chat_text(self._with_arguments(messages), tools, add_generation_prompt)

    def _with_arguments(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [with_arguments(message, as_text=self._arguments_as_text) for message in messages]

    def _find_stop_tokens(self) -> tuple[int, ...]:
        """EOS, the tokens with which the template ends turns, and the tokens that generation_config.json adds."""
        own = [self.tokenizer.eos_token_id, *self._answer_ends()]
        stops = turn_ends(own, self.tokenizer, self.name)
        if not stops:
            raise ModelError(
                "neither the tokenizer nor its chat template has a token that ends a turn; set eos_token "
                "in tokenizer_config.json"
            )
        return stops

    def _find_preamble(self) -> str:
        """The text between generation prompt and answer, without thinking. Some formats name the recipient there."""
        start = self._render([ASK], None, True)
        whole = self._render([ASK, ANSWER], None, False)
        preamble = whole.removeprefix(start).partition(ANSWER["content"])[0] if whole.startswith(start) else ""
        return preamble if preamble.strip() and _OPEN not in preamble else ""

    def _answer_ends(self) -> list[int]:
        """The token that ends an answer and the token that ends a turn with calls.

        The first control token after an answer ends it. In a format without a close, this is the token that begins the
        next message.
        """
        answered = self._controls([ASK, ANSWER], ANSWER["content"]) or self._controls(
            [ASK, ANSWER, ASK], ANSWER["content"]
        )
        return [*answered[:1], *(self._call_ends() if self._hermes is None else ())]

    def _call_ends(self) -> list[int]:
        """The token that ends a turn with calls; empty if no token can be distinguished from the close of a single
        call."""
        called, twice = ([ASK, calling(num_calls=number)] for number in (1, 2))
        one, next_turn = self._controls(called), self._controls([*called, RESULT])
        both = self._controls(twice) or one
        # A token that appears twice for two calls ends a call, not the turn.
        if not one or one == self._controls([ASK]) or next_turn[: len(one)] != one:
            return []
        return one[-1:] if both.count(one[-1]) == one.count(one[-1]) else next_turn[len(one) :][:1]

    def _controls(self, messages: list[dict[str, Any]], after: str = "") -> list[int]:
        """The control tokens of a rendering; empty if the template refuses the messages."""
        text = tried(self._render, messages, None, False)
        control = set(self.tokenizer.control_tokens.values())
        return [i for i in self.tokenizer.encode(text.rpartition(after)[2] if after else text) if i in control]


def with_arguments(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """The message with its calls' arguments in the type that the template expects: a mapping, or JSON text.

    Most templates serialise a mapping, and would quote JSON text a second time. Some concatenate the arguments with
    other text, and accept only a string.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        value = arguments_as_value(arguments)
        if isinstance(value, Mapping):
            is_text = isinstance(arguments, str) and arguments.strip()
            arguments = value if not as_text else arguments if is_text else json.dumps(value, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
