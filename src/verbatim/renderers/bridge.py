"""The next prompt of any chat template, from the ids of the last turn and what is new, wherever that is proven right.

Let P be the ids of a prompt that was rendered from messages H, C the ids that were sampled after it, A the message
that C reads as, and N the messages to append. The bridge is P + C + B. It is *right* if the template, given H + A + N,
writes: the text of P, unchanged; the turn A with the text of C, up to white space; then exactly the text of B. What a
model has seen is therefore never rewritten. White space aside, since templates trim and space JSON in their own way,
and ids are the truth; a template that would drop or move anything else of the turn (its thinking, a call) is refused.

Three looks establish it, none of which reads the history:

- `proof` shows, for all histories like this one, that N changes nothing before A, and that what is written from A on
  is what would be written after any other history like this one. `history` knows what this one is like.
- So a window, the shortest such history w, stands in for H: the template renders w and w + A + N, and the second has
  to begin with the first. The rest is A and B, cut after the token that ends a turn.
- The turn in the window has to have the text and the control tokens of C.

B begins behind a control token, which no tokenizer merges with its neighbours; so its ids are those it would have in
the whole.

Example, ChatML, H = [user "hi"], C = `yo<|im_end|>`, N = [user "so?"], w = [user "q"]. The template gives for w
`<|im_start|>user\\nq<|im_end|>\\n<|im_start|>assistant\\n`, and for w + A + N that, then `yo<|im_end|>`, then
`\\n<|im_start|>user\\nso?<|im_end|>\\n<|im_start|>assistant\\n`: this last piece is B.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from verbatim.errors import EnvironmentFault
from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.chat_template import parse_template
from verbatim.renderers.guard import BREAK, ESCAPE, LITERAL, GuardedTokenizer
from verbatim.renderers.history import History, Notes, digest
from verbatim.renderers.proof import Prover
from verbatim.types import Int32

Render = Callable[[list[dict[str, Any]], Any], str]
"""(messages, tools) -> text with a generation prompt, both marked by the guard."""


class TemplateBridge:
    """Continues prompts of one chat template; it has to be shown every prompt that it is to continue."""

    def __init__(self, tokenizer: GuardedTokenizer, source: str, render: Render, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._notes = Notes()
        self._prover = prover(source, tuple(sorted(tokenizer.special_tokens_map)))
        self._by_id = "tool_call_id" in source
        longest_first = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._stops = {tokenizer.decode([i]): i for i in stop_token_ids}
        self._windows: dict[tuple[str, str], str] = {}

    def note(self, ids: Int32, messages: Sequence[Mapping[str, Any]], tools: object) -> None:
        """Remember what a prompt was rendered from (as the guard marked it)."""
        if messages:
            self._notes.add(ids, History.of(messages, _digest_of(tools), self._prover.markers))

    def extend(
        self, prompt_ids: Int32, completion_ids: Int32, reply: dict[str, Any] | None, new: list[dict[str, Any]],
        tools: Any,
    ) -> Int32 | None:  # fmt: skip
        """The next prompt; None where it is not proven. `reply` is the message that the completion reads as, `new` are
        the messages to append, as the template is given them (marked by the guard)."""
        history = self._notes.of(prompt_ids)
        if history is None or not new or not len(completion_ids) or reply is None:
            return None
        shown = _digest_of(tools)
        seen = [History.of(part, shown, self._prover.markers) for part in ([reply], new)]
        situation = history.situation(*seen)
        if situation is None or self._prover.refusal(situation) is not None:
            return None
        rest = self._after_window(_window(history), [reply, *new], tools, shown)
        added = self._added(rest, completion_ids.tolist()) if rest is not None else None
        if added is None:
            return None
        ids = np.concatenate([prompt_ids, completion_ids, np.asarray(added, dtype=np.int32)])
        self._notes.add(ids, history.then(seen[0]).then(seen[1]))
        return ids

    def _after_window(
        self, window: list[dict[str, Any]], rest: list[dict[str, Any]], tools: Any, shown: str
    ) -> str | None:
        """What the template writes for the rest; None if it writes the window in another way before it."""
        key = (repr(window), shown)
        try:
            after = self._render([*window, *rest], tools)
            known = self._windows.get(key)
            if known is None or not after.startswith(known):  # the second where the template writes a date
                self._windows[key] = self._render(window, tools)
        except EnvironmentFault:
            return None
        before = self._windows[key]
        return after[len(before) :] if after.startswith(before) else None

    def reply(self, parsed: ParsedResponse, new: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The sampled turn as the template is given it; None if it is not known what that would be."""
        if any(call.status != "ok" for call in parsed.tool_calls):
            return None
        (message,) = self._tokenizer.guard.messages([parsed.message()])
        if self._by_id and message.get("tool_calls"):
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


@lru_cache(maxsize=64)
def prover(source: str, variables: tuple[str, ...]) -> Prover:
    """The proofs about a template, shared by all its renderers; `variables` are the special tokens that it is given."""
    # The environment that renders, so that both read the template alike.
    return Prover(parse_template(source)[1], variables)


def _window(history: History) -> list[dict[str, Any]]:
    """The shortest history that is like another one."""
    window: list[dict[str, Any]] = []
    if "user" in history.roles and history.last != "user":
        window.append({"role": "user", "content": "q"})
    if history.last == "tool" and history.called:
        call = {"id": "q", "type": "function", "function": {"name": "q", "arguments": {}}}
        window.append({"role": "assistant", "content": "q", "tool_calls": [call]})
    last: dict[str, Any] = {"role": history.last, "content": "q"}
    return [*window, last | ({"tool_call_id": "q", "name": "q"} if history.last == "tool" else {})]


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


def _digest_of(tools: Any) -> str:
    return digest(repr(tools).encode())


def _squeezed(text: str) -> str:
    return "".join(text.split())
