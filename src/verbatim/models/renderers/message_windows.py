"""Finds which parts of messages a chat format writes, by rendering.

A conversation is split into windows, each of which consists of an assistant's turn and the messages up to the next
turn. A window is identified by its shape: the roles, whether the turn has text and a thought, the kinds of the turn's
calls, and what precedes and follows the window. For each shape, a conversation of unique words is rendered once. The
rendering has to contain every word, and in order (a turn's text only has to come before the next message that is not a
tool's). The real text is never searched for, because formats trim and escape it, and because the same text may occur
twice.

Example: the window [assistant with text and one call, tool, system] after a user's message is rendered as

    user "zq question zq"  assistant "zqtextzq" zqlook(zqat="zqcalls0zq")  tool "zqw00zq"  system "zqw01zq"

and the parts whose words are missing from the prompt are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

from verbatim.core.errors import EnvironmentFault, TemplateFault
from verbatim.core.types import Message
from verbatim.models.renderers.bounded_cache import BoundedCache
from verbatim.models.renderers.probe_messages import ANSWER, ASK, NAME, RESULT, SYSTEM, TOOL, Render, calling
from verbatim.models.renderers.responses import arguments_as_value

CallKind = Literal["object", "json", "text"]
"""The kind of a call's arguments: a JSON object, JSON of another type, or text that is not JSON."""
T = TypeVar("T", bound=Hashable)

SYSTEM_ROLES = ("system", "developer")
_WINDOWS, _BYTES, _BYTES_OF_A_ROLE = 4096, 2**23, 64
"""Bounds of the cache of shapes: number of shapes, total bytes, and bytes per role. Environments use about a dozen
shapes, but clients may send any number of them."""
MOST_ALIKE = 2
"""Longer runs of equal messages are cut to this length, because a format that writes two tool answers also writes
three."""
_ROLES = 64
"""Number of roles for which `writes_name` is cached."""
_SAYS = {"content": "zq says zq", "name": "zqwho"}


class TurnShape(NamedTuple):
    """The shape of an assistant's message."""

    has_text: bool
    """True if its content is more than white space."""
    thinks: bool
    """True if its reasoning is more than white space."""
    calls: tuple[CallKind, ...]
    """The kinds of its calls, with runs of equal kinds cut to two."""


class MessageWindow(NamedTuple):
    """The shape of a turn and the messages after it."""

    below_system: bool
    """True if the conversation begins with a system message."""
    has_tools: bool
    """True if the prompt has tool schemas."""
    before: str
    """The role before the turn; "" if the turn is the first message, or the first after a leading system message."""
    turn: TurnShape | None
    """The shape of the turn; None if the window is the start of the conversation, before any turn."""
    roles: tuple[str, ...]
    """The roles of the messages after the turn, with runs of equal roles cut to two."""
    end: Literal["prompt", "end", "more"]
    """What follows the window: a generation prompt, nothing, or another turn."""


class Lost(NamedTuple):
    """What a format leaves out of a window."""

    text: bool
    """True if the format leaves out the turn's text."""
    calls: tuple[int, ...]
    """The calls that the format leaves out, as indices into `TurnShape.calls`."""
    messages: tuple[int, ...]
    """The messages after the turn that the format leaves out, as indices into `MessageWindow.roles`."""

    @property
    def nothing(self) -> bool:
        """True if everything is written."""
        return not (self.text or self.calls or self.messages)


class WindowProbes:
    """Finds what a chat format writes, window by window. Each shape is rendered once, and the result is cached.

    Args:
        render: Renders with the format.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._found: BoundedCache[MessageWindow, Lost | None] = BoundedCache(_WINDOWS, _BYTES)
        self.writes_name: Callable[[str], bool] = lru_cache(maxsize=_ROLES)(self._writes_name)
        """True if the format writes the field `name` of a message with this role."""

    def lost(self, window: MessageWindow) -> Lost | None:
        """What the format leaves out or writes in another order; None if the format refuses the window."""
        return self._found.of(window, self._probed, _BYTES_OF_A_ROLE * len(window.roles))

    def _writes_name(self, role: str) -> bool:
        said = {"role": role, **_SAYS}
        before, behind = [] if role in (*SYSTEM_ROLES, "user") else [ASK], [] if role == "user" else [ASK]
        try:
            return _SAYS["name"] in self._render([*before, said, *behind], None, True)
        except (EnvironmentFault, TemplateFault):
            return False

    def _probed(self, window: MessageWindow) -> Lost | None:
        before, turn, text, calls = _turn(window)
        behind = _behind(window.roles)
        others = [message["content"] for message in behind]
        messages = [*before, *turn, *behind, *([ANSWER] if window.end == "more" else [])]
        try:
            shown = self._render(messages, [TOOL] if window.has_tools else None, window.end == "prompt")
        except (EnvironmentFault, TemplateFault):
            return None
        start = max([0, *(shown.rfind(message["content"]) for message in before if message["content"])])
        num_answers = next((place for place, role in enumerate(window.roles) if role != "tool"), len(others))
        in_turn, end = _missing([*calls, *others[:num_answers]], shown, start)
        missing, _ = _missing(others[num_answers:], shown, max([end, *map(shown.find, text)]))
        missing |= in_turn
        return Lost(
            text=any(shown.find(word, start) < 0 for word in text),
            calls=tuple(place for place, word in enumerate(calls) if word in missing),
            messages=tuple(place for place, word in enumerate(others) if word in missing),
        )


def turns(messages: Sequence[Message]) -> Iterator[tuple[int, Message | None, Sequence[Message]]]:
    """The turns of a conversation, as (index after the turn, turn, messages up to the next turn).

    The messages before the first turn come first, with None in place of a turn.
    """
    starts = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*starts, len(messages)]
    if ends[0]:
        yield 0, None, messages[: ends[0]]
    for start, end in zip(starts, ends[1:], strict=True):
        yield start + 1, messages[start], messages[start + 1 : end]


def shape_of(message: Mapping[str, Any]) -> TurnShape:
    """The shape of an assistant's message."""
    calls = collapsed(call_kind(call["function"].get("arguments")) for call in message.get("tool_calls") or ())
    return TurnShape(
        has_text=has_text(message.get("content")),
        thinks=has_text(message.get("reasoning_content")),
        calls=tuple(kind for kind, _ in calls),
    )


def has_text(content: object) -> bool:
    """True if content is more than white space, which formats trim."""
    return isinstance(content, str) and bool(content.strip())


def call_kind(arguments: object) -> CallKind:
    """The kind of a call's arguments. Missing arguments count as an empty object."""
    value = arguments_as_value(arguments)
    if isinstance(value, Mapping):
        return "object"
    return "text" if isinstance(arguments, str) and value is arguments else "json"


def collapsed(values: Iterable[T]) -> list[tuple[T, int]]:
    """The values, each with its original index, after runs of equal values have been cut to `MOST_ALIKE`.

    >>> collapsed(["tool", "tool", "tool", "user"])
    [('tool', 0), ('tool', 1), ('user', 3)]
    """
    values = list(values)
    if len(values) <= MOST_ALIKE:
        return list(zip(values, range(len(values)), strict=True))
    runs = (list(run) for _, run in groupby(enumerate(values), key=lambda item: item[1]))
    return [(value, place) for run in runs for place, value in run[:MOST_ALIKE]]


def _turn(window: MessageWindow) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str], list[str]]:
    """(messages before the turn, turn, unique words in its text, unique words in its calls)."""
    shape = window.turn
    if shape is None:
        return [], [], [], []
    before = [SYSTEM] if window.below_system else []
    before += _BEFORE.get(window.before, [ASK, {"role": window.before, "content": "zq before zq"}])
    text = ["zqtextzq"] if shape.has_text else []
    calls = [f"zqcalls{number}zq" for number in range(len(shape.calls))]
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if shape.thinks:
        turn["reasoning_content"] = "zq thinks zq"
    if calls:
        both = enumerate(zip(shape.calls, calls, strict=True))
        turn["tool_calls"] = [_call(number, kind, word) for number, (kind, word) in both]
    return before, [turn], text, calls


def _behind(roles: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with these roles, each with a unique word. Tools answer the calls in order."""
    messages: list[dict[str, Any]] = [{"role": role, "content": f"zqw{place:02}zq"} for place, role in enumerate(roles)]
    answers = [message for message in messages if message["role"] == "tool"]
    for number, message in enumerate(answers):
        message |= {"tool_call_id": f"zqcall00{number}", "name": NAME}
    return messages


_BEFORE: Mapping[str, list[dict[str, Any]]] = {
    "": [],
    "user": [ASK],
    "assistant": [ASK, ANSWER],
    "tool": [ASK, calling(), {**RESULT, "content": "zq before zq"}],
}
"""The messages before a turn, by the role of the last of these messages."""


def _call(number: int, kind: CallKind, word: str) -> dict[str, Any]:
    arguments: Any = {"object": {"zqat": word}, "json": json.dumps([word]), "text": f"{word} {{"}[kind]
    return {"id": f"zqcall00{number}", "type": "function", "function": {"name": NAME, "arguments": arguments}}


def _missing(words: Sequence[str], shown: str, end: int) -> tuple[set[str], int]:
    """(words that do not appear in order after index `end`, index of the last word that does)."""
    missing = set[str]()
    for word in words:
        place = shown.find(word, end)
        if place < 0:
            missing.add(word)
        else:
            end = place
    return missing, end
