"""Reports how a client changed the form of answers when it sent them back in its next request. Only answers that the
gateway still recognised are reported.

Example: the answer `{"role": "assistant", "content": "", "tool_calls": [...]}` came back with the content null, an
empty field `refusal`, and the arguments of its call without white space. The report for its turn is: "content null",
"with an empty refusal", "arguments of add with different white space".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verbatim.inference.chat.anthropic_form import content_blocks
from verbatim.inference.chat.openai_form import message_body
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp
from verbatim.inference.chat.responses_form import output_items

_MISSING = object()
_CALLS, _RESULTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")


class Rewritten:
    """An `AnswerWatch` that compares each answer with the form in which the client sent it back."""

    def __init__(self) -> None:
        self._replies: dict[int, tuple[ChatRequest, ChatReply]] = {}
        self._found: dict[int, dict[str, None]] = {}

    @property
    def found(self) -> dict[int, list[str]]:
        """The turns whose answers came back changed, each with a list of the changes without duplicates."""
        return {turn: list(ways) for turn, ways in sorted(self._found.items()) if ways}

    def placed(self, request: ChatRequest, body: Mapping[str, Any], turns: Mapping[int, int]) -> None:
        """Compare the answers that the gateway recognised in a request with their original forms."""
        spoken = [place for place, message in enumerate(request.messages) if message["role"] == "assistant"]
        written = dict(zip(spoken, answers_in(request.protocol, body), strict=True))
        for place, turn in turns.items():
            answered, reply = self._replies[turn]
            ways = self._found.setdefault(turn, {})
            if answered.protocol != request.protocol:
                ways[f"in another protocol, {request.protocol}"] = None
            else:
                ways.update(dict.fromkeys(ways_of(answered, reply, written[place])))

    def answered(self, request: ChatRequest, reply: ChatReply, turn: int) -> None:
        """Keep an answer for later comparison."""
        self._replies[turn] = (request, reply)


def answers_in(protocol: str, body: Mapping[str, Any]) -> list[Any]:
    """The assistant's messages in a request, as the client wrote them.

    Each element is a message in Chat Completions, the content of a message in Anthropic's Messages, and the list of a
    turn's items in Responses.
    """
    if protocol == "openai_responses":
        return list(_turns_of(body.get("input")))
    spoken = [message for message in body["messages"] if message["role"] == "assistant"]
    return [message["content"] for message in spoken] if protocol == "anthropic_messages" else spoken


def ways_of(request: ChatRequest, reply: ChatReply, back: Any) -> list[str]:
    """Describe how an answer was changed when it came back.

    Args:
        request: The request that was answered.
        reply: The answer.
        back: The answer as the client sent it back, as returned by `answers_in`.
    """
    if request.protocol == "openai_chat":
        return list(_message(message_body(reply), back))
    if request.protocol == "anthropic_messages":
        return list(_blocks(content_blocks(reply), back))
    # The items get new random ids here, so `_parts` does not compare ids, but only checks whether there is an id.
    return list(_parts(output_items(request, Stamp(), reply), back))


def _turns_of(items: Any) -> Iterator[list[Mapping[str, Any]]]:
    """The assistant's items grouped into turns, in the same way as `read_input` joins them."""
    turn: list[Mapping[str, Any]] = []
    for item in items if isinstance(items, list) else ():
        kind = item.get("type") or "message"
        if kind in _RESULTS or (kind == "message" and item["role"] != "assistant"):
            if turn:
                yield turn
            turn = []
            continue
        if turn and kind not in _CALLS and any(_has_spoken(other) for other in turn):
            yield turn
            turn = []
        turn.append(item)
    if turn:
        yield turn


def _has_spoken(item: Mapping[str, Any]) -> bool:
    kind = item.get("type") or "message"
    return kind in _CALLS or (kind == "message" and bool(_text(item.get("content"))))


def _message(sent: Mapping[str, Any], back: Mapping[str, Any]) -> Iterator[str]:
    """The changes to a message of Chat Completions."""
    yield from _fields(sent, back, passed=("role", "content", "tool_calls"))
    yield from _content(sent["content"], back.get("content", _MISSING))
    calls = back.get("tool_calls") or ()
    # Both sides have the same number of calls, because the gateway recognises an answer only with all its calls.
    for ours, theirs in zip(sent.get("tool_calls", ()), calls, strict=True):
        name = ours["function"]["name"]
        yield from _fields(ours, theirs, passed=("id", "function"), of=f"the call of {name}")
        yield from _call(name, ours["id"], theirs.get("id"), ours["function"], theirs["function"])
    if "tool_calls" in back and not calls:
        yield f"with tool_calls {json.dumps(back['tool_calls'])}"


def _blocks(sent: Sequence[Mapping[str, Any]], back: Any) -> Iterator[str]:
    """The changes to the content of a message in Anthropic's Messages."""
    if isinstance(back, str):
        yield "content as a string"
        back = [{"type": "text", "text": back}]
    yield from _parts(sent, back)


def _parts(sent: Sequence[Mapping[str, Any]], back: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The changes to items or blocks. Each is compared with the first remaining item or block of the same type."""
    left = list(back)
    for ours in sent:
        kind = ours["type"]
        theirs = next((part for part in left if (part.get("type") or "message") == kind), None)
        if theirs is None:
            yield f"without {kind}"
            continue
        left.remove(theirs)
        if kind in (*_CALLS, "tool_use"):
            arguments, own = "arguments" if kind == "function_call" else "input", "call_id" if kind in _CALLS else "id"
            name = ours["name"]
            yield from _fields(ours, theirs, passed=(arguments, own, "id"), of=f"the call of {name}")
            if "id" not in theirs:
                yield f"without id of the call of {name}"
            yield from _call(
                name, ours[own], theirs.get(own), {"arguments": ours[arguments]}, {"arguments": theirs.get(arguments)}
            )
            continue
        yield from _fields(ours, theirs, passed=("id", "content", "text"), of=kind)
        if "id" in ours and "id" not in theirs:
            yield f"without id of {kind}"
        holds = "content" if "content" in ours else "text"
        if holds in ours:
            given = theirs.get(holds, _MISSING)
            yield from _content(_text(ours[holds]), _text(given) if isinstance(given, list) else given, of=kind)
            yield from _fields_of_part(ours[holds], given)
    yield from (f"with a further {part.get('type') or 'message'}" for part in left)


def _fields_of_part(ours: Any, theirs: Any) -> Iterator[str]:
    """The changes to the fields of a content part, if there is exactly one part on both sides."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs) == 1:
        yield from _fields(ours[0], theirs[0], passed=("text",), of="its part")


def _fields(sent: Mapping[str, Any], back: Mapping[str, Any], *, passed: Sequence[str], of: str = "") -> Iterator[str]:
    """The changes to fields: which fields were removed, added or changed."""
    behind = f" of {of}" if of else ""
    for name, value in sent.items():
        if name in passed:
            continue
        if name not in back:
            yield f"without {'' if value not in (None, '', [], {}) else 'the empty '}{name}{behind}"
        elif back[name] != value:
            yield f"different {name}{behind}"
    for name, value in back.items():
        if name not in sent and name not in passed:
            yield f"with {'' if value not in (None, '', [], {}) else 'an empty '}{name}{behind}"


def _content(sent: str, back: Any, of: str = "") -> Iterator[str]:
    behind = f" of {of}" if of else ""
    if back is _MISSING:
        yield f"without content{behind}"
    elif back is None:
        yield f"content null{behind}"
    elif isinstance(back, list):
        yield f"content as parts{behind}"
        back = _text(back)
    # The words must be the same, because otherwise the gateway would not have recognised the answer
    # (`rollouts/gateway/canonical.py`).
    if isinstance(back, str) and back != sent:
        yield f"different white space around the text{behind}"


def _call(name: str, sent_id: Any, back_id: Any, sent: Mapping[str, Any], back: Mapping[str, Any]) -> Iterator[str]:
    if back_id != sent_id:
        yield f"different id of the call of {name}"
    ours, theirs = sent["arguments"], back.get("arguments")
    # The JSON texts are compared because `==` ignores the order of keys, and 1 == 1.0 == True.
    if type(ours) is type(theirs) and (ours == theirs and json.dumps(ours) == json.dumps(theirs)):
        return
    if isinstance(ours, str) and not isinstance(theirs, str):
        yield f"arguments of {name} as {'an object' if theirs is not None else 'null'}"
    ours, theirs = _read(ours), _read(theirs)
    if json.dumps(ours) == json.dumps(theirs):
        yield f"arguments of {name} with different white space"
    elif ours == theirs and json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True):
        yield f"arguments of {name} in a different order"
    else:
        yield f"arguments of {name} written differently"


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _text(content: Any) -> Any:
    """Join the text of a list of parts; return anything else unchanged."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
