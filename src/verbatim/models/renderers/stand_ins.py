"""Finds what a chat template writes after an assistant's turn, by rendering turns that stand in for the sampled turn.

The sampled turn itself is not rendered, because the template might not write it the way it was sampled. Let H be the
messages of the prompt, and N the messages to append. A stand-in X is a turn with the same number, names and ids of
well-formed calls as the sampled one, but with our own text, arguments and thought. Several stand-ins are rendered. The
text after the turn is known if every rendering of H + X + N begins with the rendering of H and its generation prompt,
if all renderings agree from the end of X on, and if the end of X is a control token.

The text after a turn rarely depends on what precedes the turn. This is tested once for each shape of N and of the
calls, with conversations of one and of three turns, with and without a system message, tools and an earlier call. If
the text is the same for all of these, a conversation of one question replaces a long H, so that the cost of a bridge
does not grow with the conversation. Otherwise, and always in short conversations, H itself is rendered.

A stand-in thinks if the generation prompt has opened a thought, and does not think if the prompt has closed a thought.
If the prompt has done neither, both kinds are tried.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.models.renderers.bounded_cache import BoundedCache
from verbatim.models.renderers.probe_messages import ANSWER, ASK, RESULT, SYSTEM, TOOL, calling, tried
from verbatim.models.renderers.special_token_escaping import Marked

Render = Callable[[Sequence[Mapping[str, Any]], Any, Marked], str]
"""(messages, tools, messages that are already marked) -> the escaped rendering, with a generation prompt. Raises
EnvironmentFault if the template refuses the messages."""
_Messages = Sequence[Mapping[str, Any]]

_SHORT = 16
"""Conversations of up to this many messages are always rendered as they are."""
_LEAST = 2
"""Number of stand-ins that the template has to accept. A single stand-in could not be compared with another."""
_SHAPES = 256
"""Number of cached shapes of turns and answers."""
_END = "zqend"
"""The last word of each stand-in's text, or of its last argument. This word locates the end of the turn in a
rendering."""
_TEXTS = ("zq one", "zq two:\nzq lines")
_ARGUMENTS: Sequence[Callable[[str], dict[str, Any]]] = (
    lambda end: {"zqa": end},
    lambda end: {"zqb": "zq [1]", "zqc": end},
)


class StandIns:
    """Finds what one template writes after turns.

    Args:
        render: Renders with the template.
        ends: The tokens that may end a turn, as text.
    """

    def __init__(self, render: Render, ends: Sequence[str]) -> None:
        self._render = render
        self._end = re.compile("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))) or r"(?!)")
        self._same_everywhere: BoundedCache[Any, bool] = BoundedCache(_SHAPES)

    def behind(self, messages: _Messages, tools: Any, calls: Sequence[ToolCall], new: _Messages) -> str | None:
        """The escaped text that follows a turn's last part, starting with a token that ends turns; None if it varies.

        Args:
            messages: The messages of the prompt.
            tools: The tool schemas in the prompt.
            calls: The well-formed calls of the turn, with the ids that tool answers refer to.
            new: The messages to append.

        Raises:
            TemplateFault: a rendering exceeds its budget.
        """
        calls = _paired(calls, [message for message in new if message.get("role") == "tool"])
        if len(messages) > _SHORT and self._is_same_everywhere(calls, new):
            return self._behind([ASK], None, calls, new)
        return self._behind(messages, tools, calls, new)

    def _is_same_everywhere(self, calls: Sequence[ToolCall], new: _Messages) -> bool:
        ids = {call.id: number for number, call in enumerate(calls)}
        shape = (tuple(call.name for call in calls), tuple(_shape(message, ids) for message in new))
        known = self._same_everywhere.get(shape)
        if known is None:
            # Unique, short contents, so that the result depends on the shape, not on the actual text of the messages.
            texts = [{**message, "content": f"zq new {number}"} for number, message in enumerate(new)]
            found = [self._behind(*before, calls, texts) for before in self._befores()]
            known = bool(found) and found[0] is not None and all(one == found[0] for one in found)
            self._same_everywhere.add(shape, known)
        return known

    def _befores(self) -> Iterator[tuple[_Messages, Any]]:
        """One conversation of each kind that the template accepts. The first conversation is a single question."""
        for with_system, tools, has_called, num_turns in product((False, True), (None, [TOOL]), (False, True), (1, 3)):
            messages = [
                *([SYSTEM] if with_system else []),
                ASK,
                *[ANSWER, ASK] * (num_turns - 1),
                *([calling(), RESULT] if has_called else []),
            ]
            if tried(self._render, messages, tools, {}):
                yield messages, tools

    def _behind(self, messages: _Messages, tools: Any, calls: Sequence[ToolCall], new: _Messages) -> str | None:
        marked: Marked = {}
        before = tried(self._render, messages, tools, marked)
        if not before:
            return None
        found: list[str] = []
        for turn, mark in _stand_ins(before, calls):
            whole = tried(self._render, [*messages, turn, *new], tools, marked)
            if not whole:
                continue  # the format does not allow this turn, for example text next to a call
            end = self._end.search(whole, max(whole.find(mark, len(before)), len(before)))
            if end is None or not whole.startswith(before) or (found and whole[end.start() :] != found[0]):
                return None
            found.append(whole[end.start() :])
        return found[0] if len(found) >= _LEAST else None


def _stand_ins(before: str, calls: Sequence[ToolCall]) -> Iterator[tuple[dict[str, Any], str]]:
    """Stand-ins for the turn after a prompt, each with the word that ends its last part."""
    shown = before.rstrip()
    thoughts: Sequence[str | None] = (None, "zq thinks")
    if shown.endswith("<think>"):
        thoughts = ("zq thinks", "zq thinks:\nzq more")
    elif shown.endswith("</think>"):
        thoughts = (None, "")
    for number, (text, thought) in enumerate(product(_TEXTS, thoughts)):
        turn: dict[str, Any] = {"role": "assistant", "content": text if calls else text + _END}
        if calls:
            turn["content"] = text if number % 2 else ""  # some formats do not allow text next to a call
            turn["tool_calls"] = [_call(call, f"{_END}{place}", number) for place, call in enumerate(calls)]
        if thought is not None:
            turn["reasoning_content"] = thought
        yield turn, f"{_END}{len(calls) - 1}" if calls else _END


def _call(call: ToolCall, end: str, number: int) -> dict[str, Any]:
    arguments = _ARGUMENTS[number % len(_ARGUMENTS)](end)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _paired(calls: Sequence[ToolCall], answers: _Messages) -> Sequence[ToolCall]:
    """The calls with ids. A call without an id gets the id of the answer in the same position."""
    if all(call.id for call in calls) or len(calls) != len(answers):
        return calls
    return [
        call if call.id else dataclasses.replace(call, id=str(answer.get("tool_call_id") or ""))
        for call, answer in zip(calls, answers, strict=True)
    ]


def _shape(message: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[Any, ...]:
    """Everything that a template may use of a message, except the message's text. A call's id is replaced by the call's
    index."""
    return tuple(
        sorted(
            (key, str(ids.get(value, "other")) if key == "tool_call_id" and isinstance(value, str) else repr(value))
            for key, value in message.items()
            if key != "content"
        )
    )
