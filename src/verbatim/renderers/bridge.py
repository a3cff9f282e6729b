"""Builds the next prompt of any chat template: the ids of the last turn unchanged, then the ids of what is new.

Let P be the ids of a prompt that was rendered from messages H, C the ids that were sampled after it, A the message
that C reads as, and N the messages to append. The bridge is P + C + B. It is *right* if the template, given H + A + N,
writes: the text of P, unchanged; the turn A with the text of C, up to white space; then exactly the text of B. What a
model has seen is therefore never rewritten. White space aside, since templates trim and space JSON in their own way,
and ids are the truth; a template that would drop or move anything else of the turn (its thinking, a call) is refused.

That is checked on the conversation at hand. H + A + N is rendered once, and has to begin with the text that was written
for P, which `conversations` keeps: a template that writes the date, or looks at messages that were not there yet,
shows itself here. The rest is A and B, cut after the token that ends a turn; A has to have the text and the control
tokens of C. B begins behind a control token, which no tokenizer merges with its neighbours; so its ids are those it
would have in the whole. The rendering of H + A + N is then the text that is kept for the next prompt.

Example, ChatML, H = [user "hi"], C = `yo<|im_end|>`, N = [user "so?"]. For P the template wrote
`<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`; for H + A + N it writes that, then `yo<|im_end|>`, then
`\\n<|im_start|>user\\nso?<|im_end|>\\n<|im_start|>assistant\\n`: this last piece is B.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from verbatim.errors import EnvironmentFault
from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.conversations import Conversation, OpenPrompts
from verbatim.renderers.guard import BREAK, ESCAPE, LITERAL, GuardedTokenizer
from verbatim.types import Int32

Render = Callable[[list[dict[str, Any]], Any], str]
"""(messages, tools) -> text with a generation prompt, both marked by the guard."""


class TemplateBridge:
    """Continues prompts of one renderer; it has to be shown every prompt that it is to continue."""

    def __init__(self, tokenizer: GuardedTokenizer, render: Render, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._open = OpenPrompts()
        longest_first = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._stops = {tokenizer.decode([i]): i for i in stop_token_ids}

    def note(self, ids: Int32, messages: list[dict[str, Any]], tools: Any, text: str) -> None:
        """Keep what a prompt was rendered from (as the guard marked it), and its text."""
        self._open.add(ids, Conversation(messages=messages, tools=tools, text=text))

    def extend(
        self, prompt_ids: Int32, completion_ids: Int32, reply: dict[str, Any] | None, new: list[dict[str, Any]],
        tools: Any,
    ) -> Int32 | None:  # fmt: skip
        """The next prompt; None where it would not be right. `reply` is the message that the completion reads as, `new`
        are the messages to append, as the template is given them (marked by the guard).

        Where several conversations have this prompt, all of them must come to the same.

        Raises:
            TemplateFault: the rendering exceeds its budget.
        """
        known = self._open.of(prompt_ids, tools)
        if not known or not new or not len(completion_ids) or reply is None:
            return None
        completion = completion_ids.tolist()
        continued, additions = [], list[list[int]]()
        for before in known:
            messages = [*before.messages, reply, *new]
            try:
                text = self._render(messages, tools)
            except EnvironmentFault:
                return None
            added = self._added(text[len(before.text) :], completion) if text.startswith(before.text) else None
            if added is None:
                return None
            continued.append(Conversation(messages=messages, tools=tools, text=text))
            additions.append(added)
        if any(added != additions[0] for added in additions):
            return None
        ids = np.concatenate([prompt_ids, completion_ids, np.asarray(additions[0], dtype=np.int32)])
        for conversation in continued:
            self._open.add(ids, conversation)
        return ids

    def reply(
        self, parsed: ParsedResponse, new: Sequence[Mapping[str, Any]], *, paired_by_id: bool
    ) -> dict[str, Any] | None:
        """The sampled turn as the template is given it; None if it is not known what that would be.

        Args:
            parsed: The turn.
            new: The messages to append.
            paired_by_id: Whether the template reads the ids by which answers name their calls.
        """
        if any(call.status != "ok" for call in parsed.tool_calls):
            return None
        (message,) = self._tokenizer.guard.messages([parsed.message()])
        if paired_by_id and message.get("tool_calls"):
            return _with_ids(message, [answer for answer in new if answer["role"] == "tool"])
        return message

    def _added(self, rest: str, completion: list[int]) -> list[int] | None:
        """The ids of what the template writes after a turn, if its turn is the sampled one."""
        stops = self._stops
        ended = completion[-1] in stops.values()
        turn = completion[:-1] if ended else completion
        if any(i in stops.values() for i in turn):
            return None
        ends = (found for found in self._control.finditer(rest) if found[0] in stops)
        end = next((e for e in ends if not ended or stops[e[0]] == completion[-1]), None)
        if end is None or not self._same_turn(rest[: end.start()], turn):
            return None
        ids = self._tokenizer.encode(rest[end.start() :])
        if ids[:1] != [stops[end[0]]]:
            return None
        return ids[1:] if ended else ids

    def _same_turn(self, text: str, ids: list[int]) -> bool:
        """Whether ids are a text, white space aside, and its control tokens are theirs."""
        tokens = [self._tokenizer.control_tokens[token] for token in self._control.findall(text)]
        plain = text.replace(BREAK, "").replace(LITERAL, ESCAPE)
        return tokens == [i for i in ids if i in self._control_ids] and _squeezed(plain) == _squeezed(
            self._tokenizer.decode(ids)
        )


def _with_ids(message: dict[str, Any], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A message whose calls have the ids of their answers; None where it is not plain which is whose."""
    calls = message["tool_calls"]
    names = [call["function"]["name"] for call in calls]
    if not answers:
        return message
    if len(calls) == 1 and len(answers) == 1:
        order: Sequence[Mapping[str, Any]] = answers
    else:
        by_name = {answer.get("name"): answer for answer in answers}
        if len(by_name) != len(answers) or set(names) != by_name.keys() or len(names) != len(by_name):
            return None
        order = [by_name[name] for name in names]
    if any("tool_call_id" not in answer for answer in order):
        return None
    return {**message, "tool_calls": [{**c, "id": a["tool_call_id"]} for c, a in zip(calls, order, strict=True)]}


def _squeezed(text: str) -> str:
    return "".join(text.split())
