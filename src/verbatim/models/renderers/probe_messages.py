"""The messages with which renderers probe chat templates. No template's own text contains their words (zq...)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verbatim.core.errors import EnvironmentFault

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]
"""(messages, tools, add_generation_prompt) -> text. Raises EnvironmentFault if the format refuses the messages."""
NAME, VALUE = "zqlook", "zqbonn"
"""The name of the probe's tool, and the prefix of the argument in each call."""
SYSTEM: dict[str, Any] = {"role": "system", "content": "zq system zq"}
ASK: dict[str, Any] = {"role": "user", "content": "zq question zq"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "zq answer zq"}
RESULT: dict[str, Any] = {"role": "tool", "content": "zq result", "tool_call_id": "zqcall000", "name": NAME}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "zq",
        "parameters": {
            "type": "object",
            "properties": {"zqat": {"type": "string", "description": "zq"}},
            "required": ["zqat"],
        },
    },
}


def tried(render: Callable[..., str], *given: Any) -> str:
    """The rendered text, or "" if the format refuses the messages."""
    try:
        return render(*given)
    except EnvironmentFault:
        return ""


def calling(content: str = "", *, num_calls: int = 1) -> dict[str, Any]:
    """An assistant's message with calls. Their ids have nine letters and digits, as some templates require."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"zqcall00{n}", "type": "function", "function": {"name": NAME, "arguments": {"zqat": f"{VALUE}{n}"}}}
            for n in range(num_calls)
        ],
    }
