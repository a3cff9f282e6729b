"""Converts the input items of OpenAI's Responses to messages. Thinking, text and calls of a turn become one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from verbatim.core.texts import brief
from verbatim.core.types import Message
from verbatim.inference.chat.fields import MOST_MESSAGES, BadField, Fields, object_of, read_list, read_text, text_of
from verbatim.inference.chat.messages import Order, call_of, joined_text, refuse_begun
from verbatim.inference.chat.responses_tools import INPUT, joined_name

_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_IGNORED = {"id", "status", "phase", "internal_chat_message_metadata_passthrough"}
_CALLER: Mapping[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "async": (False,)}
_ITEMS = {
    "message": Fields(honoured={"type", "role", "content"}, without_effect=_IGNORED),
    "reasoning": Fields(honoured={"type", "summary", "content"}, without_effect={*_IGNORED, "encrypted_content"}),
    "function_call": Fields(
        honoured={"type", "call_id", "name", "arguments", "namespace"}, without_effect=_IGNORED, neutral=_CALLER
    ),
    "custom_tool_call": Fields(
        honoured={"type", "call_id", "name", "input", "namespace"}, without_effect=_IGNORED, neutral=_CALLER
    ),
    "function_call_output": Fields(honoured={"type", "call_id", "output"}, without_effect=_IGNORED, neutral=_CALLER),
    "custom_tool_call_output": Fields(honoured={"type", "call_id", "output"}, without_effect=_IGNORED, neutral=_CALLER),
}
"""How each field of an item is treated, by item type."""


def read_input(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """Read the conversation in a request's instructions and input.

    Example: the reasoning item "hm", the message "I add" and a call of `add` become one assistant message, because they
        were sampled as one turn.

    Raises:
        BadField: an item is malformed, or has no place in a text-only conversation.
    """
    found: list[dict[str, Any]] = []
    instructions = read_text(body, "instructions")
    if instructions:
        found.append({"role": "system", "content": instructions})
    given = body.get("input")
    items = (
        [{"role": "user", "content": given}] if isinstance(given, str) else read_list(body, "input", most=MOST_MESSAGES)
    )
    if not items:
        raise BadField("input", f"input: expected a string or a list of at least one item, found {brief(given)}")
    order = Order()
    for k, item in enumerate(items):
        where = f"input[{k}]"
        _add(found, object_of(item, where), where)
        order.note(found[-1], "input", where)
    refuse_begun(found[-1]["role"], "input", f"input[{len(items) - 1}]")
    return tuple(cast(Message, message) for message in found)


def _add(found: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item to the last assistant message if it belongs to the same turn, or else as a new message."""
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise BadField(
            "input", f"{where}: items of type {brief(kind)} are not accepted; expected one of {', '.join(_ITEMS)}"
        )
    _ITEMS[kind].check(item, where=where)
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = joined_text(item.get("output"), f"{where}.output", _TEXTS)
        found.append(
            {"role": "tool", "content": content, "tool_call_id": text_of(item.get("call_id"), f"{where}.call_id")}
        )
    elif kind in ("function_call", "custom_tool_call"):
        is_custom = kind == "custom_tool_call"
        given = {INPUT: text_of(item.get("input"), f"{where}.input")} if is_custom else item.get("arguments")
        name = joined_name(read_text(item, "namespace"), text_of(item.get("name"), f"{where}.name"))
        call = call_of(name, given, item.get("call_id"), where)
        _turn(found, start=False).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        turn = _turn(found, start=_has_spoken(found))
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _thought(item, where)
    else:
        _add_message(found, item, where)


def _add_message(found: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadField("input", f"{where}.role = {brief(role)}; expected one of {', '.join(_ROLES)}")
    content = joined_text(item.get("content"), f"{where}.content", _TEXTS)
    if role != "assistant":
        found.append({"role": _ROLES[role], "content": content})
    else:
        _turn(found, start=_has_spoken(found))["content"] = content


def _has_spoken(found: list[dict[str, Any]]) -> bool:
    """True if the last message has text or calls. In that case a further thinking or text item belongs to a new turn,
    and starts a new message."""
    return bool(found) and (bool(found[-1]["content"]) or "tool_calls" in found[-1])


def _turn(found: list[dict[str, Any]], *, start: bool) -> dict[str, Any]:
    """The last message, if it is the assistant's and `start` is False; otherwise a new assistant message, which is
    appended."""
    if start or not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The thinking in a reasoning item: its content, or its summary if the content is empty."""
    content = joined_text(item.get("content"), f"{where}.content", ("reasoning_text", "text"))
    return content or joined_text(item.get("summary"), f"{where}.summary", ("summary_text",))
