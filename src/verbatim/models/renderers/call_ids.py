"""Rewrites call ids to the form that a chat format requires.

Kimi writes a call as its id and its arguments. The tool's name is part of the id: in `functions.look:0`, 0 is the
number of earlier calls in the conversation. Mistral's templates refuse ids that are not nine letters and digits. Our
own ids (`call_0`) and other servers' ids fit neither form. Rendering shows which form a format requires.

A call id that already has the required form is kept, because it was sampled and is part of the prompt's tokens.

Many formats write no call ids (Qwen, GLM, Llama). For these formats, tool answers are sorted into the order of the
calls, because a model assumes that the first answer belongs to its first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import Message, ToolCall
from verbatim.models.renderers.conversation import SampledReply
from verbatim.models.renderers.message_windows import turns
from verbatim.models.renderers.probe_messages import ASK, NAME, RESULT, Render, calling, tried

_NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class CallIds:
    """The form of call ids in one chat format."""

    form: Literal["as_given", "unwritten", "named", "nine"]
    """named: `functions.NAME:INDEX`. nine: nine letters and digits. as_given: any id. unwritten: the format writes no
    ids; answers are matched to calls by position."""

    def rewritten(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation with its call ids in the format's form. Tool answers refer to the same calls as before.

        If exactly one answer has an unknown id and exactly one call has no answer, the answer is assumed to belong to
        that call. If every call has its answer, an unknown id is assumed to refer to a call that could not be parsed.

        Raises:
            EnvironmentFault: an answer may belong to several calls, or no turn precedes it.
        """
        if self.form == "as_given" or not any(
            message.get("tool_calls") or message.get("role") == "tool" for message in messages
        ):
            return messages
        if self.form == "unwritten":
            cut = (([] if turn is None else [turn], behind) for _, turn, behind in turns(messages))
            return [message for turn, behind in cut for message in (*turn, *_in_order(behind, _ids(turn)))]
        found, used, num_calls = list[Message](), _given(messages, self._is_own), 0
        for first, turn, behind in turns(messages):
            if turn is None:
                _refuse_answers(behind)
                found += behind
                continue
            changed, given, own = self._turn(turn, num_calls, used)
            num_calls += len(own)
            found += [changed, *self._answers(behind, first, given, own, num_calls)]
        return found

    def continuing(
        self, messages: Sequence[Message], said: SampledReply, new: Sequence[Message]
    ) -> tuple[Sequence[ToolCall], Sequence[Message]]:
        """Return (1) the calls of a sampled turn, with their ids as sampled, and (2) the new messages, whose ids refer
        to these calls.

        Args:
            messages: The messages before the turn.
            said: The sampled turn.
            new: The messages after the turn.

        Raises:
            EnvironmentFault: as for `rewritten`.
        """
        if self.form == "as_given" or not any(message.get("role") == "tool" for message in new):
            return said.calls, new
        if self.form == "unwritten":
            return said.calls, _in_order(new, [call.id for call in said.calls])
        sampled = [call.id for call in said.parsed.tool_calls if call.status == "ok"]
        sampled = sampled if len(sampled) == len(said.calls) else [""] * len(said.calls)
        num_calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        used = _given(messages, self._is_own) | set(sampled)
        own = [
            known or self._own(call.id, str(call.name), num_calls + k, used)
            for k, (known, call) in enumerate(zip(sampled, said.calls, strict=True))
        ]
        given = [call.id for call in said.calls]
        calls = [replace(call, id=own_id) for call, own_id in zip(said.calls, own, strict=True)]
        return calls, self._answers(new, len(messages) + 1, given, own, num_calls + len(own))

    def sampled(self, call: ToolCall) -> ToolCall:
        """A sampled call, without its id if the id does not have the form that the format requires."""
        return replace(call, id="") if self.form == "nine" and not self._is_own(call.id, "") else call

    def _turn(self, turn: Message, num_before: int, used: set[str]) -> tuple[Message, list[str], list[str]]:
        """(the turn with ids in the form that the format requires, the calls' previous ids, the calls' new ids)."""
        calls = cast(Any, turn.get("tool_calls") or ())
        given = _ids([turn])
        own = [
            self._own(old, call["function"]["name"], num_before + k, used)
            for k, (old, call) in enumerate(zip(given, calls, strict=True))
        ]
        if own == given:
            return turn, given, own
        changed = [{**call, "id": new} for call, new in zip(calls, own, strict=True)]
        return cast(Message, {**turn, "tool_calls": changed}), given, own

    def _own(self, given: str, name: str, index: int, used: set[str]) -> str:
        """The id of a call in the form that the format requires: the given id, or a new id that is not in `used`."""
        if self._is_own(given, name):
            return given
        while (made := f"functions.{name}:{index}" if self.form == "named" else f"call{index:05d}") in used:
            index += 1
        used.add(made)
        return made

    def _is_own(self, given: str, name: str) -> bool:
        if self.form == "named":
            return re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", given) is not None
        return _NINE.fullmatch(given) is not None

    def _answers(
        self, messages: Sequence[Message], place: int, given: Sequence[str], own: Sequence[str], num_calls: int
    ) -> list[Message]:
        """The messages after a turn, with tool answers that refer to the calls' new ids.

        Args:
            messages: The messages up to the next turn.
            place: The index in the conversation of the first of these messages.
            given: The previous ids of the turn's calls.
            own: The new ids of the turn's calls.
            num_calls: Number of calls in the conversation, up to and including the turn.
        """
        left, found, unknown = list(range(len(own))), list(messages), list[int]()
        for number, message in enumerate(messages):
            if message.get("role") != "tool":
                continue
            fitting = [k for k in range(len(own)) if _named(message) in (given[k], own[k])]
            if not fitting:
                unknown.append(number)
                continue
            call = next((k for k in fitting if k in left), fitting[-1])
            left = [k for k in left if k != call]
            found[number] = _naming(message, own[call])
        if unknown and left:
            first = messages[unknown[0]]
            if len(unknown) > 1 or len(left) > 1:
                raise EnvironmentFault(
                    f"message {place + unknown[0]} has tool_call_id = {_named(first)!r}, which is not the id of a "
                    f"call in the turn before it; expected one of {', '.join(given[k] for k in left)}"
                )
            found[unknown[0]] = _naming(first, own[left[0]])
            return found
        for k, number in enumerate(unknown):  # these messages answer calls that could not be parsed
            name = str(messages[number].get("name") or "")
            if name or self.form == "nine":
                own_id = self._own(_named(messages[number]), name, num_calls + k, set(own))
                found[number] = _naming(messages[number], own_id)
        return found


def find_call_ids(render: Render) -> CallIds:
    """Find the form of ids that a format requires, by rendering calls."""
    text = _written(render, "zqcall000")
    if text and "zqcall000" in text and NAME not in text:
        return CallIds("named")
    if text and not _written(render, "zqcall_0"):
        return CallIds("nine")
    return CallIds("as_given" if "zqcall000" in text else "unwritten")


def _written(render: Render, call_id: str) -> str:
    """The rendering of a call with this id and of its answer, or of the call alone; "" if the format refuses both.

    The answer has no `name`, so that the tool's name in the text can only come from the call.
    """
    turn = calling()
    turn["tool_calls"][0]["id"] = call_id
    answer = {key: value for key, value in RESULT.items() if key != "name"} | {"tool_call_id": call_id}
    return tried(render, [ASK, turn, answer], None, False) or tried(render, [ASK, turn], None, False)


def _ids(messages: Sequence[Message]) -> list[str]:
    """The ids of the messages' calls; "" for a call without an id."""
    return [str(call.get("id") or "") for message in messages for call in cast(Any, message.get("tool_calls") or ())]


def _in_order(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    """The messages after a turn, with the answers sorted into the order of the calls. Other messages stay in place."""
    places = [
        number
        for number, message in enumerate(messages)
        if message.get("role") == "tool" and _named(message) and _named(message) in ids
    ]
    found = list(messages)
    for place, number in zip(places, sorted(places, key=lambda k: ids.index(_named(messages[k]))), strict=True):
        found[place] = messages[number]
    return found


def _given(messages: Sequence[Message], is_own: Callable[[str, str], bool]) -> set[str]:
    """The ids in the messages that already have the form that the format requires."""
    calls = (call for message in messages for call in cast(Any, message.get("tool_calls") or ()))
    return {str(call.get("id")) for call in calls if is_own(str(call.get("id") or ""), call["function"]["name"])}


def _refuse_answers(messages: Sequence[Message]) -> None:
    """Refuse tools' answers before the first turn."""
    for number, message in enumerate(messages):
        if message.get("role") == "tool" and isinstance(message.get("content"), str):  # else refused for its content
            raise EnvironmentFault(
                f"message {number} has tool_call_id = {_named(message)!r}, but no earlier turn "
                "makes a tool call; expected the id of a call"
            )


def _named(message: Message) -> str:
    return str(message.get("tool_call_id") or "")


def _naming(message: Message, call_id: str) -> Message:
    return cast(Message, message if message.get("tool_call_id") == call_id else {**message, "tool_call_id": call_id})
