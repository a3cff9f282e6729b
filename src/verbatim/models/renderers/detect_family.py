"""Decides whether a renderer fits a model. The renderer and the model's chat template must write probe dialogues as the
same ids."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from renderers.base import MODEL_RENDERER_MAP

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.core.types import Message
from verbatim.models.renderers.renderer import Renderer, Schemas
from verbatim.models.renderers.special_token_escaping import BREAK, ESCAPE, EscapingTokenizer


def family_by_name(tokenizer: EscapingTokenizer) -> str | None:
    """The family of a published model, by the name that its tokenizer was loaded under; None for any other name."""
    family: str | None = MODEL_RENDERER_MAP.get(str(tokenizer.name_or_path))
    return family


def first_difference(renderer: Renderer, tokenizer: EscapingTokenizer) -> str | None:
    """The subject of the first probe that the renderer and the model's chat template write differently, or None.

    The renderer also has to refuse the dialogues that the template refuses. Without a template the result is None.
    """
    if not tokenizer.chat_template or getattr(renderer, "renders_by_template", False):
        return None
    for about, messages, tools in PROBES:
        for generation in (True, False):
            if _ids(renderer, messages, tools, generation) != _template_ids(tokenizer, messages, tools, generation):
                return about
    return None


_MOST_COMPLETIONS = 200
"""Maximum number of completions tried for one field of a message. Published templates need about ten."""


def check_escaping(renderer: Renderer, tokenizer: EscapingTokenizer) -> None:
    """Refuse a renderer that bypasses the special-token escaping in any field of a message or tool.

    Raises:
        ModelError: untrusted text changed the control tokens of the prompt, or did not come back when the ids were
            decoded.
    """
    # All control tokens at once, separated by the escape character, which must itself come back unchanged.
    every = f"x{ESCAPE.join([*tokenizer.control_tokens, ''])}x"
    ids = _ids(renderer, *_spoken(lambda field: every), True)
    if ids is not None and every not in tokenizer.decode(ids):
        raise ModelError(
            f'with this tokenizer, renderer "{renderer.name}" changes the text of users; {_instead(renderer)}'
        )
    bare = [token.strip() for token in tokenizer.control_tokens]
    edges = f"x{''.join(sorted({end for token in bare for end in (token[0], token[-1])}))}x"
    # Eight are enough, because a template treats all control tokens the same way.
    disguised = f"x{' '.join(map(_disguises, list(tokenizer.control_tokens)[:8]))}x"
    dialogues: Sequence[_Dialogue] = (_spoken, _instructed, _answered, _called)
    for dialogue in dialogues:
        plain = _ids(renderer, *dialogue(lambda field: _PLAIN[field]), True)
        if plain is None:
            continue
        marked = _ids(renderer, *dialogue(lambda field: edges), True)
        if marked is not None and set(BREAK).intersection(tokenizer.decode(marked)):
            raise ModelError(
                f'renderer "{renderer.name}" splits the escape marks that keep text from becoming control '
                f"tokens; {_instead(renderer)}"
            )
        own = _control_counts(tokenizer, plain)
        for hostile in ({}.fromkeys(_FIELDS, every), *({field: disguised} for field in _FIELDS)):
            _compare(renderer, tokenizer, dialogue, hostile, own)
        around = tokenizer.decode(plain).lower()
        for field, word in _PLAIN.items():
            for number, inside in enumerate(_completions(tokenizer, around, word)):
                if number == _MOST_COMPLETIONS:
                    raise ModelError(
                        f'with renderer "{renderer.name}", the text of a message could complete a special token in '
                        f"more places than can be checked; {_instead(renderer)}"
                    )
                _compare(renderer, tokenizer, dialogue, {field: inside}, own)


def _compare(
    renderer: Renderer,
    tokenizer: EscapingTokenizer,
    dialogue: _Dialogue,
    hostile: Mapping[str, str],
    own: Counter[int],
) -> None:
    ids = _ids(renderer, *dialogue(lambda field: hostile.get(field, _PLAIN[field])), True)
    if ids is None:
        return  # a renderer that refuses the text is safe
    found = _control_counts(tokenizer, ids)
    if found == own:
        return
    where = f" (in {next(iter(hostile))})" if len(hostile) == 1 else ""
    raise ModelError(
        f'renderer "{renderer.name}" lets the text of users and tools become control tokens of this '
        f"tokenizer{where}; {_instead(renderer)}"
    )


def _control_counts(tokenizer: EscapingTokenizer, ids: Sequence[int]) -> Counter[int]:
    control = set(tokenizer.control_tokens.values())
    return Counter(i for i in ids if i in control)


def _disguises(token: str) -> str:
    """Variants of a control token that a template's filters could turn into the token."""
    escaped = "".join(f"\\u{ord(character):04x}" for character in token)
    return " ".join((html.escape(token), escaped, token.lower(), token.upper(), token[::-1], "\n".join(token)))


def _completions(tokenizer: EscapingTokenizer, text: str, word: str) -> Iterator[str]:
    """Strings that, in place of `word`, would form a control token with the surrounding text."""
    tokens = {token: token.lower() for token in tokenizer.control_tokens}
    reach = max(map(len, tokens), default=0)
    places = [found.span() for found in re.finditer(re.escape(word), text)]
    for before, after in {(text[max(0, start - reach) : start], text[end : end + reach]) for start, end in places}:
        for token, lower in tokens.items():
            begins = [a for a in range(1, len(lower) - 1) if before.endswith(lower[:a])]
            ends = [b for b in range(2, len(lower)) if after.startswith(lower[b:])] if begins else []
            yield from (token[a:b] for a in begins for b in ends if a < b)


def _instead(renderer: Renderer) -> str:
    if getattr(renderer, "renders_by_template", False):
        return "its chat template has to write the text of messages unchanged"
    return 'use renderer = "template"'


def _ids(renderer: Renderer, messages: Sequence[Message], tools: Schemas, generation: bool) -> list[int] | None:
    """The ids that a renderer writes, even if these leave out the tools; None if it refuses the dialogue."""
    write = getattr(renderer, "write_ids", renderer.render_ids)
    try:
        ids: list[int] = write(messages, tools, generation).tolist()
    except EnvironmentFault:
        return None
    return ids


def _template_ids(
    tokenizer: EscapingTokenizer, messages: Sequence[Message], tools: Schemas, generation: bool
) -> list[int] | None:
    """The ids that the chat template writes; None if it refuses the dialogue.

    Some templates (DeepSeek's) require a call's arguments as JSON text, so that form is tried second.
    """
    for variant in (messages, [_with_text_arguments(message) for message in messages]):
        try:
            return tokenizer.encode(tokenizer.chat_text(variant, tools, generation))
        except EnvironmentFault:
            continue
    return None


def _with_text_arguments(message: Message) -> Mapping[str, Any]:
    calls = [
        {**call, "function": {**(f := call["function"]), "arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


_Words = Callable[[str], str]
_Dialogue = Callable[[_Words], tuple[list[Message], list[dict[str, Any]] | None]]

_FIELDS = ("system", "user", "user name", "answer", "thought", "call id", "function", "key", "value", "deep key",
           "deep value", "result", "result name", "tool", "description", "property", "choice")  # fmt: skip
_PLAIN = {field: f"zq{number:02}zqzqz" for number, field in enumerate(_FIELDS)}
"""A unique word for each field, with nine characters, because some templates require call ids of this length."""


def _spoken(words: _Words) -> tuple[list[Message], None]:
    return [{"role": "user", "content": words("user")}], None


def _instructed(words: _Words) -> tuple[list[Message], None]:
    return [{"role": "system", "content": words("system")}, {"role": "user", "content": words("user")}], None


def _answered(words: _Words) -> tuple[list[Message], None]:
    user: Message = {"role": "user", "content": words("user"), "name": words("user name")}
    answer: Message = {"role": "assistant", "content": words("answer"), "reasoning_content": words("thought")}
    return [user, answer, user], None


def _called(words: _Words) -> tuple[list[Message], list[dict[str, Any]]]:
    """A dialogue with text in every field that can contain text."""
    name, answer, thought = words("function"), words("answer"), words("thought")
    arguments = {words("key"): words("value"), "deep": [{words("deep key"): [words("deep value")]}]}
    call = {"id": words("call id"), "type": "function", "function": {"name": name, "arguments": arguments}}
    kind = {"type": "string", "description": words("description"), "enum": [words("choice")]}
    schema = {"type": "object", "properties": {words("property"): kind}, "required": [words("property")]}
    messages: list[Message] = [
        {"role": "system", "content": words("system")},
        {"role": "user", "content": words("user"), "name": words("user name")},
        {"role": "assistant", "content": answer, "reasoning_content": thought, "tool_calls": [call]},  # type: ignore[list-item]
        {"role": "tool", "content": words("result"), "tool_call_id": words("call id"), "name": words("result name")},
        {"role": "assistant", "content": answer, "reasoning_content": thought},
    ]
    function = {"name": words("tool"), "description": words("description"), "parameters": schema}
    return messages, [{"type": "function", "function": function}]


def _call(name: str, **arguments: object) -> dict[str, Any]:
    return {"id": f"functions.{name}:0", "type": "function", "function": {"name": name, "arguments": arguments}}


_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ASK: Message = {"role": "user", "content": "How warm is it?"}
_THANK: Message = {"role": "user", "content": " Thanks!\n\nAnd tomorrow? "}
_ANSWER: Message = {"role": "assistant", "content": "About 20 degrees."}
_THOUGHT: Message = {"role": "assistant", "content": "It is 20.", "reasoning_content": "Look first.\nThen say."}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_call("look", place="Bonn")]}  # type: ignore[list-item]
_TALKS: Message = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Two places.",
    "tool_calls": [
        _call("look", place="Köln", days=[1, {"a": None}], now=True),  # type: ignore[list-item]
        _call("look", place="Rom"),  # type: ignore[list-item]
    ],
}
_SEES: Message = {"role": "tool", "content": "20 °C", "tool_call_id": "functions.look:0", "name": "look"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at the sky.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]

PROBES: Sequence[tuple[str, Sequence[Message], Schemas]] = (
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
"""The probes, as (subject, messages, tools). Together they cover everything in which published chat templates
differ."""
