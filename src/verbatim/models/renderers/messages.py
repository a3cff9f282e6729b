"""Checks that an environment's messages are valid chat messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import EnvironmentFault
from verbatim.models.renderers.nesting import MAX_DEPTH, is_shallow, levels
from verbatim.models.renderers.responses import NOT_JSON, read_json

_CALL = '{"type": "function", "function": {"name": "look", "arguments": {"at": "Bonn"}}}'

_OF_TEXT = frozenset({"role", "content", "name", "tool_call_id"})
"""Keys whose values are plain text."""


def check_messages(messages: Any) -> None:
    """Refuse values that no chat template can read as messages. The template itself checks their content.

    Raises:
        EnvironmentFault: a message is invalid; the text names the first such message and what was expected.
    """
    if not isinstance(messages, (list, tuple)):
        raise EnvironmentFault(f"the messages are of type {type(messages).__name__}; expected a list of messages")
    for number, message in enumerate(messages):
        wrong = _wrong(message)
        if wrong is not None:
            raise EnvironmentFault(f"message {number} {wrong}")


def _wrong(message: Any) -> str | None:
    """Describe what is wrong with a message and what was expected; None if it is valid."""
    if not isinstance(message, Mapping):
        return f'is of type {type(message).__name__}; expected a mapping, {{"role": "user", "content": "hi"}}'
    if message.keys() <= _OF_TEXT and "role" in message and all(type(value) is str for value in message.values()):
        return None  # fast path: most messages have only text fields
    if not isinstance(message.get("role"), str):
        found = f"a role of type {type(message['role']).__name__}" if "role" in message else "no role"
        return f'has {found}; expected "role", a string such as "user" or "tool"'
    for place, arguments in enumerate(_arguments_of(message)):
        if is_deep(arguments):
            itself = "" if isinstance(arguments, str) else ", or contains itself"
            return (
                f"is nested deeper than {MAX_DEPTH} levels{itself}: tool_calls[{place}].function.arguments; "
                "expected less"
            )
    if not is_shallow(message):
        return f"is nested deeper than {MAX_DEPTH} levels, or contains itself; expected JSON values"
    keys = (key for level in levels(message) for item in level if isinstance(item, Mapping) for key in item)
    odd = next((key for key in keys if not isinstance(key, (str, int, float)) and key is not None), None)
    if odd is not None:
        return f"holds a key of type {type(odd).__name__}; expected JSON values, whose keys are strings"
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)) or not all(map(_is_call, calls)):
        return f'has "tool_calls" that are not calls; expected a list of calls such as {_CALL}'
    if calls and message["role"] != "assistant":
        return f'has "tool_calls" and the role {message["role"]!r}; only an assistant message may call tools'
    if message.get("function_call") is not None:
        return f'has a "function_call", which no chat format writes; expected "tool_calls", a list such as [{_CALL}]'
    for number, call in enumerate(calls):
        wrong = _wrong_arguments(call["function"].get("arguments"))
        if wrong is not None:
            return f"has tool_calls[{number}].function.arguments {wrong}"
    return None


def _wrong_arguments(arguments: object) -> str | None:
    """Describe what rendering would lose or change in a call's arguments; None if nothing is lost or changed. Text that
    is not JSON is rendered unchanged."""
    if not isinstance(arguments, (str, Mapping)) and arguments is not None:
        return f"of type {type(arguments).__name__}; expected an object, or its JSON text"
    value = read_json(arguments) if isinstance(arguments, str) else arguments
    if isinstance(arguments, str) and value is NOT_JSON:
        try:
            json.loads(arguments)
        except ValueError:
            return None
        return "with a key twice in an object, so one value would be lost; expected each key once"
    if any(isinstance(item, float) and not math.isfinite(item) for level in levels(value) for item in level):
        return "with a number that JSON does not have (NaN, or one beyond 1.8e308); expected finite numbers"
    return None


def _arguments_of(message: Mapping[str, Any]) -> list[object]:
    """The arguments of each of a message's tool calls; None for an entry that is not a call."""
    calls = message.get("tool_calls")
    found = calls if isinstance(calls, (list, tuple)) else ()
    return [call["function"].get("arguments") if _is_call(call) else None for call in found]


def is_deep(arguments: object) -> bool:
    """True if arguments (an object or its JSON text) are nested too deeply. False for text that is not JSON."""
    if isinstance(arguments, Mapping):
        return not is_shallow(arguments)
    if not isinstance(arguments, str) or arguments.count("[") + arguments.count("{") < MAX_DEPTH:
        return False
    try:
        return not is_shallow(json.loads(arguments))
    except RecursionError:
        return True
    except ValueError:
        return False


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
