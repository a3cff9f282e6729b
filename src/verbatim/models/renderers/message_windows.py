"""Finds by rendering which parts of messages a chat format writes, place by place.

A conversation is cut into windows: an assistant's turn and the messages up to the next one. A window is known by its
shape: the roles, whether the turn has text and a thought, the kinds of its calls, what stands before and behind it. For
each shape one conversation of unique words is rendered, once, and the words are looked for: each has to be there, and
in order (a turn's text only before the next message that is no tool's). Real text is never looked for: formats trim it,
escape it, and a user may write it twice.

Example: the window [assistant with text and one call, tool, system] behind a user's message is rendered as

    user "zq question zq"  assistant "zqtextzq" zqlook(zqat="zqcalls0zq")  tool "zqw00zq"  system "zqw01zq"

and lost are the words that the prompt lacks.
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
"""Arguments that are a JSON object, JSON of another type, or no JSON."""
T = TypeVar("T", bound=Hashable)

SYSTEM_ROLES = ("system", "developer")
_WINDOWS, _BYTES, _BYTES_OF_A_ROLE = 4096, 2**23, 64
"""Shapes that are remembered, their bytes, and those of a role. Environments have a dozen; clients may send any."""
MOST_ALIKE = 2
"""Equal neighbours that are told apart: two tools' answers are written as three are."""
_ROLES = 64
"""Roles of which it is remembered whether names are written."""
_SAYS = {"content": "zq says zq", "name": "zqwho"}


class TurnShape(NamedTuple):
    """What an assistant's message has."""

    has_text: bool
    """Content beside white space."""
    thinks: bool
    """Reasoning beside white space."""
    calls: tuple[CallKind, ...]
    """Its calls, with at most two equal neighbours."""


class MessageWindow(NamedTuple):
    """The shape of a turn and the messages behind it."""

    below_system: bool
    """Whether the conversation begins with a system message."""
    has_tools: bool
    """Whether schemas are shown."""
    before: str
    """The role before the turn; "" where it is the first message, or the first behind a leading system message."""
    turn: TurnShape | None
    """None: the window opens the conversation."""
    roles: tuple[str, ...]
    """Of the messages behind the turn, with at most two equal neighbours."""
    end: Literal["prompt", "end", "more"]
    """A generation prompt follows, nothing, or another turn."""


class Lost(NamedTuple):
    """What a format leaves out of a window."""

    text: bool
    """The text of the turn."""
    calls: tuple[int, ...]
    """Calls, by their places in the shape."""
    messages: tuple[int, ...]
    """Messages behind the turn, by their places in the shape."""

    @property
    def nothing(self) -> bool:
        """Whether all is written."""
        return not (self.text or self.calls or self.messages)


class WindowProbes:
    """What one chat format writes, by window; each is rendered once.

    Args:
        render: The format.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._found: BoundedCache[MessageWindow, Lost | None] = BoundedCache(_WINDOWS, _BYTES)
        self.writes_name: Callable[[str], bool] = lru_cache(maxsize=_ROLES)(self._writes_name)
        """Whether the format writes who speaks in a message of this role: its field `name`."""

    def lost(self, window: MessageWindow) -> Lost | None:
        """What the format leaves out, or writes in another order; None where it refuses the window."""
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
    """The turns of a conversation: (the place behind it, the turn, the messages behind it up to the next one); first,
    where there is any, what stands before all turns, behind None."""
    starts = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*starts, len(messages)]
    if ends[0]:
        yield 0, None, messages[: ends[0]]
    for start, end in zip(starts, ends[1:], strict=True):
        yield start + 1, messages[start], messages[start + 1 : end]


def shape_of(message: Mapping[str, Any]) -> TurnShape:
    """What an assistant's message has."""
    calls = collapsed(call_kind(call["function"].get("arguments")) for call in message.get("tool_calls") or ())
    return TurnShape(
        has_text=has_text(message.get("content")),
        thinks=has_text(message.get("reasoning_content")),
        calls=tuple(kind for kind, _ in calls),
    )


def has_text(content: object) -> bool:
    """Whether content holds more than white space, which formats trim."""
    return isinstance(content, str) and bool(content.strip())


def call_kind(arguments: object) -> CallKind:
    """The kind of a call's arguments; none at all are an object without members."""
    value = arguments_as_value(arguments)
    if isinstance(value, Mapping):
        return "object"
    return "text" if isinstance(arguments, str) and value is arguments else "json"


def collapsed(values: Iterable[T]) -> list[tuple[T, int]]:
    """Values with at most two equal neighbours, each with its place.

    >>> collapsed(["tool", "tool", "tool", "user"])
    [('tool', 0), ('tool', 1), ('user', 3)]
    """
    values = list(values)
    if len(values) <= MOST_ALIKE:
        return list(zip(values, range(len(values)), strict=True))
    runs = (list(run) for _, run in groupby(enumerate(values), key=lambda item: item[1]))
    return [(value, place) for run in runs for place, value in run[:MOST_ALIKE]]


def _turn(window: MessageWindow) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str], list[str]]:
    """The messages before the turn, the turn, and the words to look for: of its text, of its calls."""
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
    """Messages of these roles, each with a word of its own; tools answer the calls in order."""
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
"""What stands before a turn, by the role of the last message."""


def _call(number: int, kind: CallKind, word: str) -> dict[str, Any]:
    arguments: Any = {"object": {"zqat": word}, "json": json.dumps([word]), "text": f"{word} {{"}[kind]
    return {"id": f"zqcall00{number}", "type": "function", "function": {"name": NAME, "arguments": arguments}}


def _missing(words: Sequence[str], shown: str, end: int) -> tuple[set[str], int]:
    """The words that are not there behind a place and those before them; and the place of the last."""
    missing = set[str]()
    for word in words:
        place = shown.find(word, end)
        if place < 0:
            missing.add(word)
        else:
            end = place
    return missing, end
