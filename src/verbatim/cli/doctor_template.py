"""`verbatim doctor --template MODEL_OR_FILE`: what is proven about continuing the prompts of a chat template, and what
it writes of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from verbatim.errors import EnvironmentFault, ModelError, TemplateFault
from verbatim.plain_console import PlainConsole
from verbatim.renderers.chat_template import ChatTemplate, parse_template
from verbatim.renderers.derived_syntax import derive
from verbatim.renderers.hermes import fit
from verbatim.renderers.proof import Row, proof_table
from verbatim.renderers.template import with_arguments
from verbatim.renderers.tool_support import USE_HERMES, ToolSupport, probe

_APPENDED = {"tool": "tools' answers", "user": "a user's message"}
_LONGEST = 160
"""Characters of a line that are shown: some templates are one line."""
_NEWLINE = re.compile(r"\r\n|\r|\n")
"""What Jinja counts lines by, unlike `splitlines`."""
_OUTCOMES = {"always": "proven", "condition": "proven under a condition", "refused": "refused"}


def report(asked: str, *, as_json: bool) -> bool:
    """Print the table of each template there is; whether every kind of message may be appended, and tools are written.

    Raises:
        ModelError: no such model or file, no chat template, or one that is no Jinja.
    """
    templates = _templates(asked)
    for _, source, _ in templates:  # proofs take seconds: one that is no template is named before them
        parse_template(source, asked)
    tables = {name: (source, proof_table(source, variables)) for name, source, variables in templates}
    by_name = {name: (source, variables) for name, source, variables in templates}
    # The template that a tokenizer takes where there are tools.
    source, variables = by_name.get("tool_use", by_name.get("default", next(iter(by_name.values()))))
    try:
        support, hermes = _tools(ChatTemplate(source, {name: f"<{name}>" for name in variables}, asked))
    except TemplateFault as error:
        raise ModelError(str(error)) from error
    if as_json:
        print(json.dumps({"template": asked, "tables": {
            name: [{**asdict(row), "text": _line(source, row)} for row in rows]
            for name, (source, rows) in tables.items()
        }, "tools": {**asdict(support), "hermes": hermes}}, indent=2))  # fmt: skip
    else:
        console = PlainConsole()
        for name, (source, rows) in tables.items():
            console.print(_shown(asked if name == "default" else f"{asked}, template {name!r}", source, rows))
        console.print(f"Tools: {_said_of_tools(support, hermes)}", markup=False)
        console.print(f"The renderer of this model: {_renderer(asked)}", markup=False)
    return support.complete and all(row.outcome != "refused" for _, rows in tables.values() for row in rows)


def _templates(asked: str) -> list[tuple[str, str, Sequence[str]]]:
    """(name, source, the special tokens that it is given)"""
    file = Path(asked)
    if file.is_file():
        try:
            return [("default", file.read_text(encoding="utf-8"), ("bos_token", "eos_token", "pad_token"))]
        except (OSError, ValueError) as error:
            raise ModelError(f"{asked} cannot be read as text ({error}); expected a chat_template.jinja") from error
    tokenizer = _tokenizer(asked)
    given = tokenizer.chat_template
    named = given if isinstance(given, dict) else {"default": given}
    return [(name, source, tuple(tokenizer.special_tokens_map)) for name, source in named.items()]


def _tools(template: ChatTemplate) -> tuple[ToolSupport, str | None]:
    """What a template writes of tools, and where tools = "hermes" would write them; None if there is no place."""
    write = template.text

    def text(messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        try:
            return write(messages, tools, add_generation_prompt)
        except EnvironmentFault:  # some templates take arguments as text only
            as_text = [with_arguments(message, as_text=True) for message in messages]
            return write(as_text, tools, add_generation_prompt)

    try:
        made = fit(lambda messages, prompt: write(messages, None, prompt))
        hermes: str | None = f"schemas in a {made.opening} message, answers in a {made.answering} message"
    except ModelError:
        hermes = None
    support = probe(lambda messages, tools: text(messages, tools, True),
                    reads=derive(lambda messages, prompt: text(messages, None, prompt), ()) is not None)  # fmt: skip
    return support, hermes


def _said_of_tools(support: ToolSupport, hermes: str | None) -> str:
    if support.complete:
        return "shown, and calls are written and read back"
    lacks = f"the chat template {' and '.join(support.lacks)}, so environments with tools are refused"
    if hermes is None:
        return f'{lacks}; tools = "hermes" does not fit it either: give the model a chat_template.jinja with tools'
    return f"{lacks}; {USE_HERMES}. Hermes on this template: {hermes}"


def _renderer(asked: str) -> str:
    """What `auto` takes; of a template alone nothing is known."""
    if Path(asked).is_file():
        return "not known of a template alone; give a model's folder or name"
    from verbatim.renderers import create_renderer

    name = create_renderer("auto", _tokenizer(asked)).name
    return "template, so the table holds" if name == "template" else f"{name}, which bridges by rules of its own"


def _tokenizer(asked: str) -> Any:
    from verbatim.models.loading import load_tokenizer

    return load_tokenizer(asked)


def _shown(title: str, source: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in ("appended", "a bridge is", "if", "because of"):
        table.add_column(column, overflow="fold")
    for row in rows:
        line = _line(source, row)
        because = f"line {row.line}: {line}\n{row.reason}" if line is not None else ""
        table.add_row(_APPENDED[row.kind], _OUTCOMES[row.outcome], "\n".join(row.conditions), Text(because))
    return table


def _line(source: str, row: Row) -> str | None:
    if row.line is None:
        return None
    text = _NEWLINE.split(source)[row.line - 1].strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
