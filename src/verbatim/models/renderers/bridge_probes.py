"""Probes a chat template: which messages can be appended to a sampled turn, and where the template rewrites history.

Each probe consists of a conversation, a turn as the template itself writes it, and messages to append. As in a run, the
renderer bridges the turn or refuses. If it refuses, the renderings before and after are compared, to find the turn that
changed and the line of the template that writes the first different character.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verbatim.core.errors import RolloutError
from verbatim.core.texts import cut, error_text
from verbatim.core.types import Int32, Message
from verbatim.models.renderers.conversation import BreakReason, Conversation
from verbatim.models.renderers.special_token_escaping import BREAK, EscapingTokenizer
from verbatim.models.renderers.template import TemplateRenderer

Outcome = Literal["bridged", "refused", "left out", "raises"]
_Lines = Sequence[tuple[str, int]]
_Messages = list[Message]

_SHOWN_BY_TEXTS = (BreakReason.THOUGHT_DROPPED, BreakReason.FORMAT_UNKNOWN)
"""The reasons for a break that show as a difference between two renderings."""
_EXCERPT = 40
"""Number of characters quoted from each text."""
_WORD_BEFORE = re.compile(r"(<?[^\s<>]*)\Z")


@dataclass(frozen=True, kw_only=True)
class BridgeProbe:
    """One probe and its outcome."""

    appended: str
    """The kind of messages after the sampled turn: a key of `APPENDED`."""
    situation: str
    """The kind of conversation: a key of `SITUATIONS`."""
    outcome: Outcome
    """`bridged`, `refused` (a break), `left out` (the template does not write the appended messages), or `raises` (the
    template refuses the conversation)."""
    turn: int | None = None
    """If refused: the index of the turn, from 0, in which the renderings first differ."""
    line: int | None = None
    """If refused: the line of the template that writes the difference."""
    reason: str = ""
    """If refused: an excerpt of each rendering, from the first difference on. If the template raises: its error."""


def probe_bridges(renderer: TemplateRenderer, tokenizer: EscapingTokenizer) -> list[BridgeProbe]:
    """Probe every kind of appended message in every situation, in the order of `APPENDED` and `SITUATIONS`.

    Args:
        renderer: The template's renderer.
        tokenizer: The tokenizer that the renderer encodes with.
    """
    return [
        _ProbePlayer(renderer, tokenizer, appended, situation).outcome()
        for appended in APPENDED
        for situation in SITUATIONS
    ]


class _ProbePlayer:
    """Runs one probe."""

    def __init__(self, renderer: TemplateRenderer, tokenizer: EscapingTokenizer, appended: str, situation: str) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._appended, self._situation = appended, situation
        self._messages, self._tools, thinks = SITUATIONS[situation]
        num_calls, self._new = APPENDED[appended]
        self._turn = sum(message["role"] == "assistant" for message in self._messages)
        self._reply = _turn(self._turn, num_calls=num_calls, thinks=thinks)
        self._stops = "|".join(map(re.escape, renderer.end_texts))

    def outcome(self) -> BridgeProbe:
        """Run the probe."""
        try:
            before = self._lines(self._messages)
            sampled = self._sampled(_text(before))
            if sampled is None:
                return self._refused(before, "", self._lines([*self._messages, self._reply, *self._new]))
            prompt = self._renderer.write_ids(self._messages, self._tools, True)
            completion = np.asarray(self._tokenizer.encode(sampled), dtype=np.int32)
            parsed = self._renderer.parse_response(completion, prompt, self._tools)
            readable = [call for call in parsed.tool_calls if call.status == "ok"]
            ids = [str(call.get("id")) for call in self._reply.get("tool_calls", [])]
            calls = [dataclasses.replace(call, id=i) for call, i in zip(readable, ids, strict=False)]
            parsed = dataclasses.replace(parsed, tool_calls=tuple(calls))
            bridged = self._prompt(prompt).answered(completion, parsed).bridged(self._new, self._tools)
            if len(readable) != len(ids):
                return self._made("refused", reason="the turn's calls are not written, or cannot be read back")
            after = self._lines([*self._messages, parsed.message(), *self._new])
        except RolloutError as error:
            return self._made("raises", reason=cut(error_text(error.__cause__ or error), 200))
        if bridged in _SHOWN_BY_TEXTS:
            return self._refused(before, sampled, after)
        if isinstance(bridged, BreakReason):
            return self._made("refused", reason=bridged.sentence)
        written = _text(after)
        return self._made("bridged" if all(message["content"] in written for message in self._new) else "left out")

    def _prompt(self, ids: Int32) -> Conversation:
        return Conversation(
            renderer=self._renderer,
            messages=tuple(self._messages),
            tools=self._tools,
            prompt_ids=ids,
            thinks=self._renderer.holds_thoughts(self._messages),
        )

    def _sampled(self, kept: str) -> str | None:
        """The turn as the template writes it, up to its end token; None if the template changes the prompt before the
        turn.

        Some templates write an empty thinking block into the last turn, which a model that does not think would not
        sample. So a turn without thinking is, if possible, taken from the rendering in which the appended messages
        follow it.
        """
        alone = _text(self._lines([*self._messages, self._reply], prompt=False))
        above = _text(self._lines([*self._messages, self._reply, *self._new]))
        for text in (alone, above) if "reasoning_content" in self._reply else (above, alone):
            end = re.compile(self._stops).search(text, len(kept))
            if text.startswith(kept) and end:
                return text[len(kept) : end.end()]
        return None

    def _lines(self, messages: _Messages, *, prompt: bool = True) -> _Lines:
        return self._renderer.write_lines(messages, self._tools, prompt)

    def _refused(self, before: _Lines, sampled: str, after: _Lines) -> BridgeProbe:
        """Find where the prompt and the turn differ from the rendering with the appended messages."""
        kept, now = _text(before) + sampled, _text(after)
        at, there = _parting(kept, now, exact=len(kept) - len(sampled))
        if at == len(kept):
            return self._made(
                "refused", reason="the answers cannot be matched to the turn's calls, or no token ends the turn"
            )
        return self._made(
            "refused",
            turn=sum(_words(turn) in kept[:at] for turn in range(self._turn)),
            line=_line(after, there),
            reason=f"{_quoted(kept, at)} becomes {_quoted(now, there)}",
        )

    def _made(self, outcome: Outcome, **found: Any) -> BridgeProbe:
        return BridgeProbe(appended=self._appended, situation=self._situation, outcome=outcome, **found)


def _parting(kept: str, now: str, *, exact: int) -> tuple[int, int]:
    """The index of the first difference in each of the two texts. From `exact` on, white space is ignored."""
    at = there = 0
    while at < len(kept):
        if at >= exact and kept[at].isspace():
            at += 1
        elif at >= exact and now[there : there + 1].isspace():
            there += 1
        elif kept[at] != now[there : there + 1]:
            break
        else:
            at, there = at + 1, there + 1
    return at, there


def _line(lines: _Lines, place: int) -> int | None:
    """The template line that writes the character at an index, or the last line if the text is shorter."""
    line = None
    for text, line in lines:  # noqa: B007  the last value is used after the loop
        place -= len(text)
        if place < 0:
            break
    return line


def _text(lines: _Lines) -> str:
    return "".join(text for text, _ in lines)


def _quoted(text: str, at: int) -> str:
    """An excerpt of a text that starts with the word or tag around an index."""
    start = at - len(_WORD_BEFORE.search(text[max(at - _EXCERPT, 0) : at])[0])  # type: ignore[index]  # finds "" too
    text = text[start:].replace(BREAK, "")
    return repr(text[:_EXCERPT]) + ("..." if len(text) > _EXCERPT else "") if text else "nothing"


def _turn(number: int, *, num_calls: int = 0, thinks: bool = False) -> Message:
    """A turn that ends with the unique words `_words(number)`, either in its text or in its calls."""
    calls = [
        {
            "id": f"zqcall00{call}",
            "type": "function",
            "function": {"name": f"zqtool{call}", "arguments": {"place": _words(number)}},
        }
        for call in range(num_calls)
    ]
    turn: Message = {"role": "assistant", "content": "" if calls else _words(number)}
    if calls:
        turn["tool_calls"] = calls  # type: ignore[typeddict-item]
    if thinks:
        turn["reasoning_content"] = f"zq turn {number} thinks"
    return turn


def _words(number: int) -> str:
    return f"zq turn {number} says"


def _said(role: str, number: int = 0) -> Message:
    message: Message = {"role": role, "content": f"zq {role} {number} says"}
    if role == "tool":
        message |= {"tool_call_id": f"zqcall00{number}", "name": f"zqtool{number}"}
    return message


_ASK = _said("user")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"zqtool{number}",
            "description": "zq",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for number in range(2)
]

APPENDED: Mapping[str, tuple[int, _Messages]] = {
    "a tool's answer": (1, [_said("tool")]),
    "several tools' answers": (2, [_said("tool"), _said("tool", 1)]),
    "a tool's answer, then the user": (1, [_said("tool"), _said("user", 1)]),
    "a user's message": (0, [_said("user", 1)]),
    "a system message": (0, [_said("system", 1)]),
}
"""(number of calls in the sampled turn, messages appended to it)"""

SITUATIONS: Mapping[str, tuple[_Messages, list[dict[str, Any]] | None, bool]] = {
    "plain": ([_ASK], None, False),
    "system message": ([_said("system"), _ASK], None, False),
    "tools": ([_ASK], _TOOLS, False),
    "second turn": ([_ASK, _turn(0), _said("user", 2)], None, False),
    "after a call": ([_ASK, _turn(0, num_calls=1), _said("tool")], _TOOLS, False),
    "the turn thinks": ([_ASK], None, True),
    "an earlier turn thought": ([_ASK, _turn(0, thinks=True), _said("user", 2)], None, False),
    "thinks before every call": ([_ASK, _turn(0, num_calls=1, thinks=True), _said("tool")], _TOOLS, True),
}
"""(messages before the sampled turn, tools in the prompt, whether the turn thinks)"""
