"""Converts messages and tools to canonical form: content as one string, arguments as objects, tools as functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.core.texts import brief
from verbatim.core.types import MessageToolCall
from verbatim.inference.chat.answer import read_arguments
from verbatim.inference.chat.fields import MOST_MESSAGES, BadField, object_of, text_of

_NOT_IN_PROMPTS = ("strict", "cache_control", "defer_loading")
"""Keys of a tool that concern sampling or storage and must not be shown to the model."""


def joined_text(content: object, where: str, kinds: Collection[str] = ("text",)) -> str:
    """A message's content as one string: the text of all parts, joined without a separator.

    >>> joined_text([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "messages[0].content")
    'hi'

    Raises:
        BadField: a part is not text (an image, audio, a file), or the value is neither a string nor a list.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField("messages.content", f"{where}: expected text, found {brief(content)}")
    if len(content) > MOST_MESSAGES:
        raise BadField("messages.content", f"{where}: {len(content)} parts; at most {MOST_MESSAGES} are accepted")
    return "".join(_text_of(part, where, kinds) for part in content)


def _text_of(part: object, where: str, kinds: Collection[str]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
        raise BadField("messages.content", f"{where}: only text is accepted, found {brief(part)}")
    text: str = part["text"]
    return text


def call_of(name: object, arguments: object, call_id: object, where: str) -> MessageToolCall:
    """A function call from the conversation so far. Arguments that can be parsed as JSON become an object; other
    arguments stay as they are."""
    given: Any = arguments
    if isinstance(arguments, str):
        read, _ = read_arguments(arguments)
        given = arguments if read is None else read
    elif arguments is None:
        given = {}
    elif not isinstance(arguments, dict):
        raise BadField("messages.tool_calls", f"{where}: expected arguments as JSON text, found {brief(arguments)}")
    call: MessageToolCall = {
        "type": "function",
        "function": {"name": text_of(name, f"{where}.name"), "arguments": given},
    }
    if call_id is not None:
        call = {"id": text_of(call_id, f"{where}.id"), **call}
    return call


def function_tool(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert an object with a name, a description and a parameter schema into a tool in OpenAI's format.

    Other keys are kept, so that the model sees them, except the keys in `_NOT_IN_PROMPTS`.
    """
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadField("tools", f"{where}: expected functions with a name, found {brief(function)}")
    if function.get("parameters") is not None:
        object_of(function["parameters"], f"{where}.parameters")
    if function.get("description") is not None:
        text_of(function["description"], f"{where}.description")
    kept = {key: value for key, value in function.items() if key not in _NOT_IN_PROMPTS and value is not None}
    return {"type": "function", "function": kept}


@dataclass
class Order:
    """Checks the order of a request's messages, one by one.

    The results of a turn's tool calls must directly follow the turn, before any user or system message. Otherwise the
    prompt would have other text between a call and its result, which models are not trained on. The APIs of Anthropic
    and OpenAI refuse such requests too.
    """

    spoke_at: str = ""
    """Role and path of the first user or system message after a turn with calls, for the error message; "" if there is
    none."""
    _has_called: bool = False
    """True if the last turn made calls."""

    def note(self, message: Mapping[str, Any], field: str, where: str) -> None:
        """Check the next message.

        Args:
            message: The message.
            field: Name of the field that holds the messages.
            where: Path of the message, such as "messages[3]".

        Raises:
            BadField: see `result`.
        """
        if message["role"] == "assistant":
            self.turn(calls="tool_calls" in message)
        elif message["role"] == "tool":
            self.result(field, where)
        else:
            self.said(message["role"], where)

    def turn(self, *, calls: bool) -> None:
        """Note an assistant turn; `calls` is True if it has tool calls."""
        self.spoke_at, self._has_called = "", calls

    def said(self, role: str, where: str) -> None:
        """Note a user or system message. Empty messages count too, because they are also rendered into the prompt."""
        if self._has_called and not self.spoke_at:
            self.spoke_at = f"a {role} message ({where})"

    def result(self, field: str, where: str) -> None:
        """Check the result of a tool call.

        Raises:
            BadField: there is a user or system message between the turn with the call and this result.
        """
        if self.spoke_at:
            raise BadField(
                field,
                f"{where}: the result of a call comes after {self.spoke_at}; send the results of a turn's calls "
                "directly after the turn, and other messages after the results",
            )


def refuse_begun(role: str, field: str, where: str) -> None:
    """Refuse a request that ends with an assistant message (a prefill). Continuing the message is not supported, and
    sampling a new turn after it is not what the client wants.

    Args:
        role: Role of the last message.
        field: Name of the field that holds the messages.
        where: Path of the last message.

    Raises:
        BadField: the role is "assistant".
    """
    if role == "assistant":
        raise BadField(
            field,
            f"{where}: the last message is the assistant's, and continuing it is not supported; end with a user "
            "message or the result of a call",
        )


def text_of_all(values: Sequence[object]) -> int:
    """Total number of characters of all strings in JSON values, including keys."""
    size, left = 0, list(values)
    while left:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return size
