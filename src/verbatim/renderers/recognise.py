"""Whether a renderer is the one for a model: probe dialogues, compared id by id with the model's own chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from verbatim.errors import ModelError
from verbatim.renderers.base import Renderer
from verbatim.renderers.guard import ESCAPE, GuardedTokenizer
from verbatim.types import Message

Dialogue = tuple[str, Sequence[Message], Sequence[Mapping[str, Any]] | None]
"""(what it is about, messages, tools)"""


def first_difference(renderer: Renderer, tokenizer: GuardedTokenizer) -> str | None:
    """What the first probe is about that a renderer does not render as the model's own chat template does, or None."""
    for about, messages, tools in PROBES:
        for generation in (True, False):
            theirs = _template_ids(tokenizer, messages, tools, generation)
            if theirs is None or renderer.render_ids(messages, tools, generation).tolist() != theirs:
                return about
    return None


def check_guarded(renderer: Renderer, tokenizer: GuardedTokenizer) -> None:
    """Refuse a renderer that encodes past the guard.

    Raises:
        ModelError: a user's text changed the control tokens of the prompt, or did not come back from the ids.
    """
    hostile = "".join(f"{token}{ESCAPE}" for token in tokenizer.control_tokens)
    plain = _control_counts(renderer, tokenizer, "x")
    if _control_counts(renderer, tokenizer, f"x{hostile}x") != plain:
        raise ModelError(f'renderer "{renderer.name}" lets the text of a user become control tokens of this tokenizer; '
                         'use renderer = "template"')  # fmt: skip


def _control_counts(renderer: Renderer, tokenizer: GuardedTokenizer, text: str) -> Counter[int]:
    ids = renderer.render_ids([{"role": "user", "content": text}]).tolist()
    if text not in tokenizer.decode(ids):
        raise ModelError(f'renderer "{renderer.name}" changes the text of a user with this tokenizer; use renderer = '
                         '"template"')  # fmt: skip
    control = set(tokenizer.control_tokens.values())
    return Counter(i for i in ids if i in control)


def _template_ids(
    tokenizer: GuardedTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    generation: bool,
) -> list[int] | None:
    """What the chat template gives; None where it refuses such a dialogue."""
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=tools, add_generation_prompt=generation, return_dict=False
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None
    return list(ids)


def _call(name: str, **arguments: object) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ASK: Message = {"role": "user", "content": "How warm is it?"}
_THANK: Message = {"role": "user", "content": " Thanks!\n\nAnd tomorrow? "}
_ANSWER: Message = {"role": "assistant", "content": "About 20 degrees."}
_THOUGHT: Message = {"role": "assistant", "content": "It is 20.", "reasoning_content": "Look first.\nThen say."}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_call("look", place="Bonn")]}  # type: ignore[list-item]
_TALKS: Message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Two places.",
                   "tool_calls": [_call("look", place="Köln", days=[1, 2]), _call("look", place="Rom")]}  # type: ignore[list-item]  # fmt: skip
_SEES: Message = {"role": "tool", "content": "20 °C", "tool_call_id": "call_look", "name": "look"}
_TOOLS = [{"type": "function", "function": {
    "name": "look", "description": "Look at the sky.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}}]  # fmt: skip

PROBES: Sequence[tuple[str, Sequence[Message], Sequence[Mapping[str, Any]] | None]] = (
    ("one question", [_ASK], None),
    ("a system message", [_SYSTEM, _ASK], None),
    ("a question with tools", [_ASK], _TOOLS),
    ("a system message with tools", [_SYSTEM, _ASK], [*_TOOLS, *_TOOLS]),
    ("an answer", [_ASK, _ANSWER], None),
    ("a second question", [_SYSTEM, _ASK, _ANSWER, _THANK], None),
    ("thinking", [_ASK, _THOUGHT], None),
    ("the thinking of an earlier turn", [_ASK, _THOUGHT, _THANK], None),
    ("a tool call", [_ASK, _CALLS], _TOOLS),
    ("a tool's answer", [_SYSTEM, _ASK, _CALLS, _SEES], _TOOLS),
    ("two tool calls after thinking", [_ASK, _TALKS, _SEES, _SEES], _TOOLS),
    ("an answer after tools", [_ASK, _TALKS, _SEES, _SEES, _ANSWER, _THANK], _TOOLS),
    ("thinking between tools", [_ASK, _CALLS, _SEES, _TALKS, _SEES, _SEES, _THOUGHT], _TOOLS),
)
"""(what it is about, messages, tools): together they exercise everything that chat templates do differently."""
