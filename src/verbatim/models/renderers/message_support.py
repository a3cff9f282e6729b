"""Ensures that rendering loses no message: what a chat format does not write is folded into other messages or refused.

Many chat templates write only the first system message, do not know the role `developer`, or raise "System message must
be at the beginning". What a format writes is found by rendering (`message_windows`). The rules are:

- a system or developer message that the format writes at its position stays as it is;
- otherwise, the system and developer messages at the start of the conversation become one system message, joined by
  empty lines;
- any later system or developer message becomes a user message at its position, or part of the adjacent user message if
  the format does not allow two user messages in a row. It is never moved to the front, so that the prompt still extends
  the tokens sampled before;
- a tool's answer after a turn without a readable call is treated the same way, if the format writes answers only to
  calls (gpt-oss, Gemma 4);
- a message's `name` is refused if the format does not write it, except in a tool's answer, because the tool's name is
  also in the call;
- everything else that would be lost is refused with the name of its field: `messages[3].content`.

Example, for a format that writes one system message, and does not allow two user messages in a row:

    system "Be brief."  developer "In German."  user "Hi"  assistant "Hallo"  system "It is late."  user "And now?"
    system "Be brief.\\n\\nIn German."  user "Hi"  assistant "Hallo"  user "It is late.\\n\\nAnd now?"

Two things are left to the format. It may drop thoughts (`bridge`), including the text next to a call if it writes that
text as a thought (gpt-oss). And it decides the order inside a turn: Gemma 4 writes the text after the calls and their
answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import Message
from verbatim.models.renderers.bounded_cache import BoundedCache
from verbatim.models.renderers.message_windows import (
    MOST_ALIKE,
    SYSTEM_ROLES,
    CallKind,
    Lost,
    MessageWindow,
    TurnShape,
    WindowProbes,
    call_kind,
    collapsed,
    has_text,
    shape_of,
    turns,
)
from verbatim.models.renderers.probe_messages import Render
from verbatim.models.renderers.renderer import Schemas

LaterSystem = Literal["fold", "refuse"]
"""What happens to a system or developer message that the format does not write: it is folded by the rules above, or
refused with an EnvironmentFault."""
_PLANS, _BYTES, _BYTES_OF_A_ROLE = 4096, 2**22, 64
_FOLD = 'orchestrator.renderer.later_system = "fold" writes it in another message'


class Folded(NamedTuple):
    """A conversation in a form that the format can write."""

    messages: Sequence[Message]
    """The messages to write."""
    places: Sequence[int]
    """For each message, its index among the given messages, or the index of the first message that was folded into
    it."""


class _WindowPlan(NamedTuple):
    """How to fold two kinds of messages in one window: system messages, and tool answers without a call.

    A run is a series of adjacent messages of the same kind.
    """

    leads: bool = False
    """True if the first run becomes one system message."""
    folded: frozenset[int] = frozenset()
    """Indices of the runs that become a user message."""
    joins: bool = False
    """True if folded messages are joined with adjacent user messages."""


_AS_GIVEN = _WindowPlan()


class MessageSupport:
    """Folds or refuses the messages that a chat format does not write.

    Args:
        render: Renders with the format, even if the format leaves out a part of the messages.
        who: The format's name, for messages.
        later_system: What to do with system messages that the format does not write.
    """

    def __init__(self, render: Render, who: str, later_system: LaterSystem) -> None:
        self._probes = WindowProbes(render)
        self._who, self._later_system = who, later_system
        self._plans: BoundedCache[MessageWindow, _WindowPlan | int] = BoundedCache(_PLANS, _BYTES)

    def folded(self, messages: Sequence[Message], tools: Schemas) -> Folded:
        """The conversation with its system and developer messages folded into a form that the format writes.

        Raises:
            EnvironmentFault: the format does not write a message in any form, `later_system` refuses it, or a name
                would be lost.
        """
        self._refuse_names(messages, 0)
        if not _may_fold(messages):
            return Folded(messages, range(len(messages)))
        done: list[Message] = []
        places: list[int] = []
        for first, turn, behind in turns(messages):
            if turn is not None:
                done.append(turn)
                places.append(first - 1)
            before = _role_before(done, len(done) - 1)
            new = self._folded_behind(behind, first, (_below_system(done), bool(tools), before, turn))
            done += new.messages
            places += new.places
        return Folded(done, places)

    def appended(
        self, messages: Sequence[Message], turn: Message, new: Sequence[Message], tools: Schemas
    ) -> Sequence[Message]:
        """Fold the new messages after a sampled turn, with the same result as `folded` for the whole conversation.

        Args:
            messages: The folded messages before the turn.
            turn: The sampled turn's message.
            new: The messages after the turn.
            tools: The tool schemas in the prompt.

        Raises:
            EnvironmentFault: the format leaves out one of the new messages.
        """
        first, before = len(messages) + 1, _role_before(messages, len(messages))
        self._refuse_names(new, first)
        end = next((place for place, message in enumerate(new) if message["role"] == "assistant"), len(new))
        about = (_below_system(messages), bool(tools), before, turn)
        behind = self._folded_behind(new[:end], first, about)
        window = _window(about, [message["role"] for message in behind.messages], "prompt")
        lost = self._probes.lost(window)
        if lost is not None and lost.messages:
            self._refuse_message(behind.messages, behind.places, lost)
        return [*behind.messages, *new[end:]]

    def check(self, given: Folded, tools: Schemas, add_generation_prompt: bool) -> None:
        """Refuse a folded conversation if the format leaves out a part of it.

        Raises:
            EnvironmentFault: a part would be lost; the message names the field.
        """
        for window, start, end in _windows(given.messages, tools, add_generation_prompt):
            lost = self._probes.lost(window)
            if lost is None or lost.nothing:
                continue  # None means that the format refuses the window itself; its own error says why
            if window.turn is not None:
                turn, name = given.messages[start], f"messages[{given.places[start]}]"
                self._refuse_calls(turn, name, window.turn, lost)
                if lost.text and not self._is_thought(window):
                    beside = "text next to a call" if window.turn.calls else "this assistant's text"
                    raise EnvironmentFault(
                        f"{name}.content: {self._who} does not write {beside}; put the text into a "
                        "message of its own, or leave it out"
                    )
            first = start if window.turn is None else start + 1
            if lost.messages:
                self._refuse_message(given.messages[first:end], given.places[first:end], lost)

    def naming(self, fault: EnvironmentFault, given: Folded, tools: Schemas, prompt: bool) -> EnvironmentFault:
        """The format has refused a folded conversation with `fault`. Return the same error with the index of the
        refused message, or `fault` itself if rendering the windows' shapes does not reveal this message."""
        for window, start, end in _windows(given.messages, tools, prompt):
            if self._probes.lost(window) is not None:
                continue
            if window.turn is not None and (field := self._refused_call(window, given.messages[start])):
                return EnvironmentFault(f"messages[{given.places[start]}].{field}; {fault}")
            places = [start] if window.turn is not None else []
            places += [
                start + len(places) + place
                for _, place in collapsed(message["role"] for message in given.messages[start + len(places) : end])
            ]
            behind = len(places) - len(window.roles)
            if window.end == "more" and self._probes.lost(window._replace(end="prompt")) is not None:
                return EnvironmentFault(f"messages[{given.places[end]}]: {fault}")  # the next turn
            refused = next((number for number in range(len(places)) if self._refuses(window, number + 1 - behind)), -1)
            return EnvironmentFault(f"messages[{given.places[places[refused]]}]: {fault}")
        return fault

    def _refuses(self, window: MessageWindow, size: int) -> bool:
        """True if the format refuses the window with only the first `size` messages after the turn."""
        shorter = window._replace(roles=window.roles[:size], end="prompt" if size < len(window.roles) else window.end)
        return self._probes.lost(shorter) is None

    def _refused_call(self, window: MessageWindow, turn: Message) -> str:
        """The call that makes the format refuse a window, as its field and what was expected; "" if no call does.

        This is the first call whose arguments are not a JSON object, if the format accepts the window with objects
        instead; or the second call, if the format accepts the window with only one call.
        """
        assert window.turn is not None
        # Probe with the calls repaired, then with a single call: which change makes the format accept the window?
        kinds = [call_kind(call["function"].get("arguments")) for call in turn.get("tool_calls") or ()]
        odd = next((place for place, kind in enumerate(kinds) if kind != "object"), None)
        plain: list[CallKind] = ["object"] * min(len(kinds), MOST_ALIKE)
        mended = window._replace(turn=window.turn._replace(calls=tuple(plain)))
        single = window._replace(turn=window.turn._replace(calls=tuple(plain[:1])))
        if odd is not None and self._probes.lost(mended) is not None:
            return f"tool_calls[{odd}].function.arguments: expected a JSON object"
        if len(kinds) > 1 and self._probes.lost(single) is not None:
            return "tool_calls[1]: expected one call"
        return ""

    def _is_thought(self, window: MessageWindow) -> bool:
        """True if the format drops the text next to a call once another turn follows, as it drops thoughts."""
        if window.turn is None or not window.turn.calls or window.end != "more":
            return False
        lost = self._probes.lost(window._replace(end="prompt"))
        return lost is None or not lost.text

    def _refuse_calls(self, turn: Message, name: str, shape: TurnShape, lost: Lost) -> None:
        if not lost.calls:
            return
        calls = turn.get("tool_calls") or ()
        kinds = collapsed(call_kind(call["function"].get("arguments")) for call in calls)
        place = kinds[lost.calls[0]][1]
        field = f"{name}.tool_calls[{place}]"
        if shape.calls[lost.calls[0]] != "object":
            found = repr(calls[place]["function"].get("arguments"))
            raise EnvironmentFault(
                f"{field}.function.arguments: {self._who} only writes arguments that are a JSON object, "
                f"found {found[:80]}; send an object, or the call as text"
            )
        about = "no calls in this place; leave the call out, or send it as text"
        if place:
            about = "only one call per message; give each call a message of its own, followed by its answer"
        raise EnvironmentFault(f"{field}: {self._who} writes {about}")

    def _refuse_message(self, messages: Sequence[Message], places: Sequence[int], lost: Lost) -> None:
        """Refuse the first of the lost messages that has text. A lost message without text does no harm."""
        kinds = collapsed(message["role"] for message in messages)
        for number in lost.messages:
            role, place = kinds[number]
            if has_text(messages[place].get("content")):
                what = "a tool's answer" if role == "tool" else f"a message of the role {role!r}"
                raise EnvironmentFault(
                    f"messages[{places[place]}].content: {self._who} does not write {what} in this "
                    "place; move the text to a user's message, or to another place"
                )

    def _folded_behind(
        self, messages: Sequence[Message], first: int, about: tuple[bool, bool, str, Message | None]
    ) -> Folded:
        """Fold the messages between two turns. `first` is the index of the first of these messages in the
        conversation."""
        given = Folded(messages, range(first, first + len(messages)))
        turn = about[-1]
        foldable = (*SYSTEM_ROLES, *(() if turn is None or turn.get("tool_calls") else ("tool",)))
        roles = [message["role"] for message in messages]
        if not any(role in foldable for role in roles):
            return given
        if not all(isinstance(message.get("content") or "", str) for message in messages):
            return given
        plan = self._plan(_window(about, roles, "prompt"))
        if isinstance(plan, int):
            runs = [(role, place + first) for role, place in collapsed(roles)]
            role, place = runs[plan]
            raise EnvironmentFault(
                f"messages[{place}].content: {self._who} writes no message of the role {role!r} in "
                f"this place{self._advice}"
            )
        if plan != _AS_GIVEN:
            self._refuse_names(messages, first, folding=foldable)
        return _apply(plan, given)

    def _refuse_names(self, messages: Sequence[Message], first: int, *, folding: Sequence[str] = ()) -> None:
        """Refuse a `name` that would be lost. Folding removes the names of messages with a role in `folding`."""
        for place, message in enumerate(messages, first):
            name, role = message.get("name"), message["role"]
            if not name or role == "tool" or (role not in folding and self._probes.writes_name(role)):
                continue
            raise EnvironmentFault(
                f"messages[{place}].name: {self._who} does not write who sent this message, found {name!r:.80}; "
                "put the name into the message's content, or leave it out"
            )

    @property
    def _advice(self) -> str:
        if self._later_system == "refuse":
            return f"; {_FOLD}"
        return ", nor a user's message in its place; move the text elsewhere"

    def _plan(self, window: MessageWindow) -> _WindowPlan | int:
        """How to fold the system messages of a window, or the index of a message that cannot be written."""
        return self._plans.of(window, self._found_plan, _BYTES_OF_A_ROLE * len(window.roles))

    def _found_plan(self, window: MessageWindow) -> _WindowPlan | int:
        foldable = (*SYSTEM_ROLES, *(("tool",) if self._folds_answers(window) else ()))
        places = [place for place, role in enumerate(window.roles) if role in foldable]
        lost = self._probes.lost(window)
        missing = places if lost is None else [place for place in places if place in lost.messages]
        if not missing:
            return _AS_GIVEN
        plan = next((plan for plan in _plans(window, set(missing)) if self._is_written(plan, window)), None)
        if plan is None and lost is None:
            return _AS_GIVEN  # the format refuses every form; rendering then reports the format's own error
        return missing[0] if plan is None or self._later_system == "refuse" else plan

    def _folds_answers(self, window: MessageWindow) -> bool:
        """True if the window's tool answers follow no call, and the format would write them after a call."""
        if "tool" not in window.roles or window.turn is None or window.turn.calls:
            return False
        call = TurnShape(has_text=False, thinks=False, calls=("object",))
        lost = self._probes.lost(window._replace(before="user", turn=call, roles=("tool",)))
        return lost is not None and lost.nothing

    def _is_written(self, plan: _WindowPlan, window: MessageWindow) -> bool:
        roles = _roles(plan, window.roles)
        lost = self._probes.lost(window._replace(roles=roles))
        return lost is not None and all(roles[place] == "tool" for place in lost.messages)


def _plans(window: MessageWindow, missing: set[int]) -> Iterator[_WindowPlan]:
    """The ways to fold a window, the least invasive first."""
    runs = _runs(window.roles)
    hit = {number for number, (_, run) in enumerate(runs) if missing.intersection(run)}
    systems = hit | {number for number, (kind, _) in enumerate(runs) if kind == "system"}
    if window.turn is None and runs[0][0] == "system":
        for folded in (hit - {0}, systems - {0}):
            yield _WindowPlan(leads=True, folded=frozenset(folded))
            yield _WindowPlan(leads=True, folded=frozenset(folded), joins=True)
    for folded in (hit, systems):
        yield _WindowPlan(folded=frozenset(folded))
        yield _WindowPlan(folded=frozenset(folded), joins=True)


def _apply(plan: _WindowPlan, given: Folded) -> Folded:
    """Apply a plan to the messages between two turns."""
    if plan == _AS_GIVEN:
        return given
    written: list[Message] = []
    places: list[int] = []
    is_folded: list[bool] = []
    for number, (_, run) in enumerate(_runs([message["role"] for message in given.messages])):
        messages = [given.messages[place] for place in run]
        folds = number in plan.folded
        if folds or (plan.leads and number == 0):
            text = _joined(messages)
            messages = [{"role": "user" if folds else "system", "content": text}] if text or not folds else []
        for offset, message in enumerate(messages):
            joins = bool(written) and written[-1]["role"] == message["role"] == "user" and (folds or is_folded[-1])
            if plan.joins and joins:
                written[-1] = {**written[-1], "content": _joined([written[-1], message])}
                is_folded[-1] = True
            else:
                written.append(message)
                places.append(given.places[run[offset]])
                is_folded.append(folds)
    return Folded(written, places)


def _roles(plan: _WindowPlan, roles: Sequence[str]) -> tuple[str, ...]:
    """The roles of a window's messages after a plan was applied."""
    # A plan depends only on roles, so any text will do, except empty text, which would be dropped.
    messages: list[Message] = [{"role": role, "content": "zq"} for role in roles]
    folded = _apply(plan, Folded(messages, range(len(messages)))).messages
    return tuple(role for role, _ in collapsed(message["role"] for message in folded))


def _joined(messages: Sequence[Message]) -> str:
    """The text of the messages, separated by empty lines."""
    return "\n\n".join(text for message in messages if (text := message.get("content") or ""))


def _runs(roles: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Runs of adjacent messages of the same kind, as (kind, indices). The kind is "system", "tool", or ""."""
    kinds = ["system" if role in SYSTEM_ROLES else "tool" if role == "tool" else "" for role in roles]
    return [(kind, [place for place, _ in run]) for kind, run in groupby(enumerate(kinds), key=lambda item: item[1])]


def _below_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if the conversation begins with a system or developer message."""
    return bool(messages) and messages[0]["role"] in SYSTEM_ROLES


def _role_before(messages: Sequence[Message], place: int) -> str:
    """The role of the message before an index; "" if there is none, or only the leading system message."""
    return "" if place < 1 or (place == 1 and _below_system(messages)) else messages[place - 1]["role"]


def _may_fold(messages: Sequence[Message]) -> bool:
    """True if some message may need folding: a system or developer message, or a tool's answer after a turn without
    calls."""
    has_calls = True
    for message in messages:
        role = message["role"]
        if role == "assistant":
            has_calls = bool(message.get("tool_calls"))
        elif role in SYSTEM_ROLES or (role == "tool" and not has_calls):
            return True
    return False


def _windows(messages: Sequence[Message], tools: Schemas, prompt: bool) -> Iterator[tuple[MessageWindow, int, int]]:
    """The windows of a folded conversation, each with the index of its first message and the index after its last
    message."""
    below = _below_system(messages)
    for first, turn, behind in turns(messages):
        start, end = first - (turn is not None), first + len(behind)
        last: Literal["prompt", "end"] = "prompt" if prompt else "end"
        about = (below, bool(tools), _role_before(messages, start), turn)
        roles = [message["role"] for message in behind]
        yield _window(about, roles, last if end == len(messages) else "more"), start, end


def _window(
    about: tuple[bool, bool, str, Message | None], roles: Sequence[str], end: Literal["prompt", "end", "more"]
) -> MessageWindow:
    below, has_tools, before, turn = about
    return MessageWindow(
        below_system=below and turn is not None,
        has_tools=has_tools,
        before=before,
        turn=None if turn is None else shape_of(turn),
        roles=tuple(role for role, _ in collapsed(roles)),
        end=end,
    )
