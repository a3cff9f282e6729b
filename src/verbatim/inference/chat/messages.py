"""Makes messages and tools canonical: one text as content, arguments as objects, tools as functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.core.texts import brief
from verbatim.core.types import MessageToolCall
from verbatim.inference.chat.answer import read_arguments
from verbatim.inference.chat.fields import MOST_MESSAGES, BadField, object_of, text_of

_NOT_IN_PROMPTS = ("strict", "cache_control", "defer_loading")
"""Keys of tools that say how to sample or to store; they are no part of what the model reads."""


def joined_text(content: object, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Content as one text: the texts of its parts, one directly behind the other.

    >>> joined_text([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "messages[0].content")
    'hi'

    Raises:
        BadField: an image, a sound, a file, or what is no content.
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
        raise BadField("messages.content", f"{where}: only text is taken here, found {brief(part)}")
    text: str = part["text"]
    return text


def call_of(name: object, arguments: object, call_id: object, where: str) -> MessageToolCall:
    """A call of a function in the history. Arguments that are JSON text become an object; others stay as they are."""
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
    """A tool in OpenAI's format, from its name, its description and the schema of its parameters.

    What a request says beside these about the function is for the model to read too, except how to sample.
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
    """Checks the order of a request's messages, as they come.

    Behind the calls of a turn come their results, and only then what the user or a system message says: in between it
    would stand between a call and its result in the prompt. The services of Anthropic and of OpenAI refuse such
    requests too.
    """

    spoke_at: str = ""
    """Who has spoken since the last turn, and where; "" = neither has, or no turn has made calls."""
    _has_called: bool = False

    def note(self, message: Mapping[str, Any], field: str, where: str) -> None:
        """A message of the conversation.

        Args:
            message: The message.
            field: The field that holds it.
            where: Its place.

        Raises:
            BadField: as `result`.
        """
        if message["role"] == "assistant":
            self.turn(calls="tool_calls" in message)
        elif message["role"] == "tool":
            self.result(field, where)
        else:
            self.said(message["role"], where)

    def turn(self, *, calls: bool) -> None:
        """A turn of the assistant."""
        self.spoke_at, self._has_called = "", calls

    def said(self, role: str, where: str) -> None:
        """A text of the user or of the system, if only an empty one: it is a message of its own in the prompt."""
        if self._has_called and not self.spoke_at:
            self.spoke_at = f"what the {role} says ({where})"

    def result(self, field: str, where: str) -> None:
        """A result of a call.

        Raises:
            BadField: the user or the system has spoken since the turn with the call.
        """
        if self.spoke_at:
            raise BadField(
                field,
                f"{where}: the result of a call stands behind {self.spoke_at}; send the results of a "
                "turn's calls first, directly behind it, and texts behind them",
            )


def refuse_begun(role: str, field: str, where: str) -> None:
    """Refuse a request that ends with a message of the assistant: to go on with it is not supported, and a new turn
    behind it is not what is asked for.

    Args:
        role: Of the last message.
        field: The field that holds the messages.
        where: Of the last message.

    Raises:
        BadField: it is the assistant's.
    """
    if role == "assistant":
        raise BadField(
            field,
            f"{where}: the last one is the assistant's, which would have to be continued; that is "
            "not supported: end with a message of the user, or with the result of a call",
        )


def text_of_all(values: Sequence[object]) -> int:
    """Number of characters of all strings in JSON values, keys included."""
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
