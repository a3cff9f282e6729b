"""Writes tools in the Hermes format into plain messages, for chat templates without tool support.

Messages are rewritten after escaping and before the template sees them, so the tags are trusted, but the text inside
the tags is not. The rules are:

- the tool schemas are added to the system message, or to the first user's message if the template has no system role;
- a call becomes text in the assistant's message,
  `<tool_call>\\n{"name": "look", "arguments": {"at": "Bonn"}}\\n</tool_call>`;
- the answers to one turn become one message,
  `<tool_response>\\n{"name": "look", "content": "20 °C"}\\n</tool_response>`, with the role `tool`, or with the role
  `user` if the template does not write `tool` messages unchanged.

Answers, arguments and schemas are JSON, in which a tag is written as `\\u003c/tool_response>`. So no text can close the
block that it is in, and parsing returns the original text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers.probe_messages import ANSWER, ASK, RESULT, TOOL, Render, calling, tried
from verbatim.models.renderers.renderer import Schemas
from verbatim.models.renderers.special_token_escaping import BREAK, ESCAPE, LITERAL
from verbatim.models.renderers.tool_syntax import ToolSyntax

SYNTAX = ToolSyntax(form="whole", before="", opens="<tool_call>", closes="</tool_call>")
"""The syntax of Hermes calls."""
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_ANSWER_TAGS, _TOOLS_TAGS = TAGS[4:], TAGS[:2]

_MARKS = f"(?:{BREAK})*"
_TAG_START = re.compile(f"<(?={_MARKS}(?:{'|'.join(_MARKS.join(map(re.escape, tag[1:])) for tag in TAGS)}))")
_PREAMBLE = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
    "You may call one or more functions to assist with the user query. Don't make assumptions about what values to "
    "plug into functions. Here are the available tools:\n<tools>\n"
)
_INSTRUCTIONS = (
    "\n</tools>\nUse the following pydantic model json schema for each tool call you will make: "
    '{"properties": {"name": {"title": "Name", "type": "string"}, "arguments": {"title": "Arguments", "type": '
    '"object"}}, "required": ["name", "arguments"], "title": "FunctionCall", "type": "object"}\nFor each function call '
    "return a json object with function name and arguments within <tool_call></tool_call> XML tags as follows:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>'
)


@dataclass(frozen=True, kw_only=True)
class HermesFormat:
    """In which messages one chat template can contain tools and their answers. All text is already escaped."""

    opening: Literal["system", "user"]
    """The role whose first message contains the schemas."""
    answering: Literal["tool", "user"]
    """The role of the messages that contain tools' answers."""
    plain_tags: frozenset[str] = frozenset(TAGS)
    """Tags that are ordinary text for the tokenizer. All other tags are control tokens, which untrusted text cannot
    form."""

    def wrap(self, messages: Sequence[Mapping[str, Any]], tools: Schemas) -> list[dict[str, Any]]:
        """Rewrite messages so that they contain only roles and text.

        Example, `opening="system"`: one user's message "hi" and a tool become a system message with the schemas and
        the user's message.

        Raises:
            EnvironmentFault: a user's text contains a tag that would be mistaken for ours, or no message can contain
                the schemas.
        """
        written: list[dict[str, Any]] = []
        in_answers = False
        for number, message in enumerate(messages):
            role, text = message["role"], message.get("content") or ""
            if role == "user":
                self._refuse_tags(text, number, with_tools=bool(tools))
            if role == "tool":
                self._append(written, self.answering, _answer(message), join=in_answers)
            elif role == "user" and in_answers and self.answering == "user":
                self._append(written, role, text, join=True)
            else:
                calls = [_call(call) for call in message.get("tool_calls") or ()]
                rest = {key: value for key, value in message.items() if key != "tool_calls"}
                written.append({**rest, "content": "\n".join(filter(None, [text, *calls]))} if calls else rest)
            in_answers = role == "tool"
        return self._with_tools(written, tools) if tools else written

    def _append(self, written: list[dict[str, Any]], role: str, text: str, *, join: bool) -> None:
        if join:
            written[-1] = {"role": role, "content": f"{written[-1]['content']}\n{text}"}
        else:
            written.append({"role": role, "content": text})

    def _with_tools(self, written: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        section = _section(tools)
        if self.opening == "system":
            if not written or written[0]["role"] != "system":
                return [{"role": "system", "content": section}, *written]
            first = 0
            texts = [written[0].get("content") or "", section]
        else:
            found = next((i for i, message in enumerate(written) if message["role"] == "user"), None)
            if found is None:
                raise EnvironmentFault(
                    'tools = "hermes" writes the tools into the first user message, because the chat template '
                    "has no system role; but the conversation has no user message"
                )
            first = found
            texts = [section, written[first].get("content") or ""]
        wrapped = {**written[first], "content": "\n\n".join(filter(None, texts))}
        return [*written[:first], wrapped, *written[first + 1 :]]

    def _refuse_tags(self, text: str, number: int, *, with_tools: bool) -> None:
        """Refuse a user's text if it contains a tag that marks our own blocks in user messages (schemas or answers)."""
        ours = [
            *(_ANSWER_TAGS if self.answering == "user" else ()),
            *(_TOOLS_TAGS if self.opening == "user" and with_tools else ()),
        ]
        shown = text.replace(BREAK, "").replace(LITERAL, ESCAPE)
        found = next((tag for tag in ours if tag in self.plain_tags and tag in shown), None)
        if found is not None:
            raise EnvironmentFault(
                f'message {number} (user) contains {found}, which with tools = "hermes" and this chat template would '
                "be mistaken for a tool's output; remove it from the text"
            )


def fit(render: Render, control_tokens: Collection[str] = ()) -> HermesFormat:
    """Find which messages of a chat template can contain tools and their answers, by rendering.

    Args:
        render: The chat template.
        control_tokens: The tokenizer's control tokens.

    Raises:
        ModelError: schemas, calls or answers cannot be written; the message says which.
    """
    plain = frozenset(TAGS) - frozenset(control_tokens)
    openings: Sequence[Literal["system", "user"]] = ("system", "user")
    formats = [HermesFormat(opening=opening, answering="user", plain_tags=plain) for opening in openings]
    showing = [made for made in formats if _shows(render, made)]
    if not showing:
        raise _no_room("the tools' schemas in a system message or a user message, unchanged")
    # Some templates move the system message to the newest question. With schemas in it, history would be rewritten
    # every turn.
    opening = next((made.opening for made in showing if _keeps(render, made)), showing[0].opening)
    answerings: Sequence[Literal["tool", "user"]] = ("tool", "user")
    for answering in answerings:
        made = HermesFormat(opening=opening, answering=answering, plain_tags=plain)
        if _answers(render, made):
            return made
    raise _no_room("a call in an assistant message together with its result in a tool or user message, unchanged")


def _shows(render: Render, made: HermesFormat) -> bool:
    """True if the template writes the schemas unchanged."""
    return _section([TOOL]) in tried(render, made.wrap([ASK], [TOOL]), None, True)


def _keeps(render: Render, made: HermesFormat) -> bool:
    """True if the beginning of the prompt, which contains the schemas, stays unchanged when a later question
    follows."""
    before = tried(render, made.wrap([ASK], [TOOL]), None, True)
    return tried(render, made.wrap([ASK, ANSWER, ASK], [TOOL]), None, True).startswith(before)


def _answers(render: Render, made: HermesFormat) -> bool:
    """True if the template writes calls and answers unchanged, in the last turn and in earlier turns."""
    called = calling(num_calls=2)
    for later in ([], [ANSWER, ASK]):
        text = tried(render, made.wrap([ASK, called, RESULT, RESULT, *later], None), None, True)
        # The count excludes templates that wrap tool answers in tags of their own, which would duplicate our tags.
        own = [_call(call) for call in called["tool_calls"]] + [f"{_answer(RESULT)}\n{_answer(RESULT)}"]
        if not all(part in text for part in own) or text.count("<tool_response>") != 2:
            return False
    return True


def _no_room(what: str) -> ModelError:
    return ModelError(
        f'tools = "hermes" does not fit this chat template, which does not write {what}; give the model '
        "a chat_template.jinja with tools"
    )


def _section(tools: Sequence[Mapping[str, Any]]) -> str:
    return _PREAMBLE + "\n".join(_json(tool) for tool in tools) + _INSTRUCTIONS


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = _json({"name": function["name"], "arguments": function.get("arguments") or {}})
    return f"<tool_call>\n{written}\n</tool_call>"


def _answer(message: Mapping[str, Any]) -> str:
    named = {"name": message["name"]} if message.get("name") else {}
    return f"<tool_response>\n{_json({**named, 'content': message.get('content') or ''})}\n</tool_response>"


def _json(value: Any) -> str:
    """JSON text that contains none of the tags and parses back to the same value."""
    return _TAG_START.sub(r"\\u003c", json.dumps(value, ensure_ascii=False))
