"""Whether a renderer is the one for a model: probe dialogues, compared id by id with the model's own chat template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from renderers.base import MODEL_RENDERER_MAP

from verbatim.errors import EnvironmentFault, ModelError
from verbatim.renderers.base import Renderer
from verbatim.renderers.guard import ESCAPE, GuardedTokenizer
from verbatim.types import Message

Dialogue = tuple[str, Sequence[Message], Sequence[Mapping[str, Any]] | None]
"""(what it is about, messages, tools)"""


def family_by_name(tokenizer: GuardedTokenizer) -> str | None:
    """The family of the published model that the tokenizer was loaded as; None for any other name, or a folder."""
    family: str | None = MODEL_RENDERER_MAP.get(str(tokenizer.name_or_path))
    return family


def first_difference(renderer: Renderer, tokenizer: GuardedTokenizer) -> str | None:
    """What the first probe is about that a renderer does not render as the model's own chat template does, or None.

    Where the template refuses a dialogue, the renderer has to refuse it too. Without a template nothing differs.
    """
    if not tokenizer.chat_template or getattr(renderer, "renders_by_template", False):
        return None
    for about, messages, tools in PROBES:
        for generation in (True, False):
            if _ids(renderer, messages, tools, generation) != _template_ids(tokenizer, messages, tools, generation):
                return about
    return None


def check_guarded(renderer: Renderer, tokenizer: GuardedTokenizer) -> None:
    """Refuse a renderer that encodes past the guard, in any field of a message or of a tool.

    Raises:
        ModelError: untrusted text changed the control tokens of the prompt, or did not come back from the ids.
    """
    hostile = "".join(f"{token}{ESCAPE}" for token in tokenizer.control_tokens)
    control = set(tokenizer.control_tokens.values())
    for dialogue in (_spoken, _called):
        counts = []
        for text in ("x", f"x{hostile}x"):
            messages, tools = dialogue(text)
            try:
                ids = renderer.render_ids(messages, tools).tolist()
            except EnvironmentFault:
                break  # refused is guarded
            if dialogue is _spoken and text not in tokenizer.decode(ids):
                raise ModelError(f'renderer "{renderer.name}" changes the text of a user with this tokenizer; '
                                 f"{_instead(renderer)}")  # fmt: skip
            counts.append(Counter(i for i in ids if i in control))
        if len(counts) == 2 and counts[0] != counts[1]:
            raise ModelError(f'renderer "{renderer.name}" lets the text of users and tools become control tokens of '
                             f"this tokenizer; {_instead(renderer)}")  # fmt: skip


def _instead(renderer: Renderer) -> str:
    if getattr(renderer, "renders_by_template", False):
        return "its chat template has to write the content of messages as it is, where that is text"
    return 'use renderer = "template"'


def _ids(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    generation: bool,
) -> list[int] | None:
    """What a renderer gives; None where it refuses such a dialogue."""
    try:
        ids: list[int] = renderer.render_ids(messages, tools, generation).tolist()
    except EnvironmentFault:
        return None
    return ids


def _template_ids(
    tokenizer: GuardedTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    generation: bool,
) -> list[int] | None:
    """What the chat template gives; None where it refuses such a dialogue.

    Some templates (DeepSeek's) want a call's arguments as JSON text: they are asked a second time.
    """
    for variant in (messages, [_with_text_arguments(message) for message in messages]):
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in variant],
                tools=tools, add_generation_prompt=generation, return_dict=False,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            continue
        return list(ids)
    return None


def _with_text_arguments(message: Message) -> Mapping[str, Any]:
    calls = [
        {**call, "function": {**(f := call["function"]), "arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _spoken(text: str) -> tuple[list[Message], None]:
    return [{"role": "user", "content": text}], None


def _called(text: str) -> tuple[list[Message], list[dict[str, Any]]]:
    """The text in every field that text can be in."""
    name = f"look{text}"
    arguments = {text: text, "deep": [{text: [text]}]}
    call = {"id": text, "type": "function", "function": {"name": name, "arguments": arguments}}
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}},
              "required": [text]}  # fmt: skip
    messages: list[Message] = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},  # type: ignore[list-item]
        {"role": "tool", "content": text, "tool_call_id": text, "name": name},
        {"role": "assistant", "content": text, "reasoning_content": text},
    ]
    return messages, [{"type": "function", "function": {"name": name, "description": text, "parameters": schema}}]


def _call(name: str, **arguments: object) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ASK: Message = {"role": "user", "content": "How warm is it?"}
_THANK: Message = {"role": "user", "content": " Thanks!\n\nAnd tomorrow? "}
_ANSWER: Message = {"role": "assistant", "content": "About 20 degrees."}
_THOUGHT: Message = {"role": "assistant", "content": "It is 20.", "reasoning_content": "Look first.\nThen say."}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_call("look", place="Bonn")]}  # type: ignore[list-item]
_TALKS: Message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Two places.",
                   "tool_calls": [_call("look", place="Köln", days=[1, {"a": None}], now=True),  # type: ignore[list-item]
                                  _call("look", place="Rom")]}  # type: ignore[list-item]  # fmt: skip
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
