"""Checks that what an environment returns are chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbatim.errors import EnvironmentFault
from verbatim.renderers.responses import MAX_DEPTH, is_shallow, levels

_CALL = '{"type": "function", "function": {"name": "look", "arguments": {"at": "Bonn"}}}'


def check_messages(messages: Any) -> None:
    """Refuse values that no chat template can read as messages; contents are checked by the template itself.

    Raises:
        EnvironmentFault: names the first invalid message, and what was expected.
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
    if not isinstance(message.get("role"), str):
        found = f"a role of type {type(message['role']).__name__}" if "role" in message else "no role"
        return f'has {found}; expected "role", a text such as "user" or "tool"'
    if not is_shallow(message):
        return f"is nested deeper than {MAX_DEPTH} levels, or holds itself; expected JSON values"
    keys = (key for level in levels(message) for item in level if isinstance(item, Mapping) for key in item)
    odd = next((key for key in keys if not isinstance(key, (str, int, float)) and key is not None), None)
    if odd is not None:
        return f"holds a key of type {type(odd).__name__}; expected JSON values, whose keys are texts"
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)) or not all(map(_is_call, calls)):
        return f'has "tool_calls" that are none; expected a list of calls such as {_CALL}'
    if any(_is_deep_text(call["function"].get("arguments")) for call in calls):
        return f"has arguments whose JSON text is nested deeper than {MAX_DEPTH} levels; expected less"
    return None


def _is_deep_text(arguments: object) -> bool:
    """Whether arguments given as JSON text are nested too deeply; text that is not JSON is never too deep."""
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
