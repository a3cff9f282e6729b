"""Finds what a chat template writes behind an assistant's turn, by rendering turns that stand in for the sampled one.

H are the messages of the prompt, N those to append. A stand-in X is a turn with the number, the names and the ids of
the calls that were read (no readable call: no call), and with texts, arguments and a thought of ours. Several are
rendered. What is written behind the turn is known if every rendering of H + X + N begins with the rendering of H with
its generation prompt, is the same from the end of X on, and if the end of X is a control token.

What is written behind a turn seldom depends on what stands before it. Whether it does is found out once for each shape
of N and of the calls, over conversations with one and with three turns, with and without a system message, tools and an
earlier call. Where it does not, a conversation of one question stands in for a long H, so that the time of a bridge
does not grow with the conversation. Else, and always in short conversations, the one at hand is rendered.

A stand-in thinks where the generation prompt has opened a thought, does not where it has closed one, and both is tried
where it leaves that open.
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
"""(messages, tools, messages that are marked already) -> what the template writes, with a generation prompt, marked by
the escaping. Raises EnvironmentFault where it refuses them."""
_Messages = Sequence[Mapping[str, Any]]

_SHORT = 16
"""Messages of a conversation that is always rendered itself."""
_LEAST = 2
"""Stand-ins that the template has to write."""
_SHAPES = 256
"""Shapes of turns and answers that are remembered."""
_END = "zqend"
"""Ends the text, or the last argument, of each stand-in."""
_TEXTS = ("zq one", "zq two:\nzq lines")
_ARGUMENTS: Sequence[Callable[[str], dict[str, Any]]] = (
    lambda end: {"zqa": end},
    lambda end: {"zqb": "zq [1]", "zqc": end},
)


class StandIns:
    """What one template writes behind turns.

    Args:
        render: The template.
        ends: The texts of the tokens that may end a turn.
    """

    def __init__(self, render: Render, ends: Sequence[str]) -> None:
        self._render = render
        self._end = re.compile("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))) or r"(?!)")
        self._same_everywhere: BoundedCache[Any, bool] = BoundedCache(_SHAPES)

    def behind(self, messages: _Messages, tools: Any, calls: Sequence[ToolCall], new: _Messages) -> str | None:
        """What the template writes from the end of a turn on: marked text that begins with a token that ends turns.
        None where renderings do not agree.

        Args:
            messages: Those of the prompt.
            tools: The schemas that it shows.
            calls: The readable calls of the turn, with the ids that answers name.
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
            texts = [{**message, "content": f"zq new {number}"} for number, message in enumerate(new)]
            found = [self._behind(*before, calls, texts) for before in self._befores()]
            known = bool(found) and found[0] is not None and all(one == found[0] for one in found)
            self._same_everywhere.add(shape, known)
        return known

    def _befores(self) -> Iterator[tuple[_Messages, Any]]:
        """Conversations of every kind that the template writes, one question first."""
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
                continue  # a turn that the format does not have, such as a text beside a call
            end = self._end.search(whole, max(whole.find(mark, len(before)), len(before)))
            if end is None or not whole.startswith(before) or (found and whole[end.start() :] != found[0]):
                return None
            found.append(whole[end.start() :])
        return found[0] if len(found) >= _LEAST else None


def _stand_ins(before: str, calls: Sequence[ToolCall]) -> Iterator[tuple[dict[str, Any], str]]:
    """Turns that may follow a prompt, each with the text that its last part ends with."""
    shown = before.rstrip()
    thoughts: Sequence[str | None] = (None, "zq thinks")
    if shown.endswith("<think>"):
        thoughts = ("zq thinks", "zq thinks:\nzq more")
    elif shown.endswith("</think>"):
        thoughts = (None, "")
    for number, (text, thought) in enumerate(product(_TEXTS, thoughts)):
        turn: dict[str, Any] = {"role": "assistant", "content": text if calls else text + _END}
        if calls:
            turn["content"] = text if number % 2 else ""
            turn["tool_calls"] = [_call(call, f"{_END}{place}", number) for place, call in enumerate(calls)]
        if thought is not None:
            turn["reasoning_content"] = thought
        yield turn, f"{_END}{len(calls) - 1}" if calls else _END


def _call(call: ToolCall, end: str, number: int) -> dict[str, Any]:
    arguments = _ARGUMENTS[number % len(_ARGUMENTS)](end)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _paired(calls: Sequence[ToolCall], answers: _Messages) -> Sequence[ToolCall]:
    """The calls with ids: those without one get the id of the answer in their place."""
    if all(call.id for call in calls) or len(calls) != len(answers):
        return calls
    return [
        call if call.id else dataclasses.replace(call, id=str(answer.get("tool_call_id") or ""))
        for call, answer in zip(calls, answers, strict=True)
    ]


def _shape(message: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[Any, ...]:
    """What a template may look at in a message, beside its text; the id of a call as the place of the call."""
    return tuple(
        sorted(
            (key, str(ids.get(value, "other")) if key == "tool_call_id" and isinstance(value, str) else repr(value))
            for key, value in message.items()
            if key != "content"
        )
    )
